"""Plan: what will be done, decided once, with the reason of each choice.

`resolve(config, path)` leaves no `auto` and no None. The plan is printed, hashed, and sent to workers."""

from trine.amount import size

from .record import Choice, Plan, Reasons
from .resolve import resolve

__all__ = ["Choice", "Plan", "Reasons", "resolve", "size"]
