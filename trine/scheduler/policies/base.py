"""The seam for policies: who runs next, who is admitted next, and who makes room.

The scheduler keeps both its lists by arrival and gives a policy no other power than an order. What
holds for each policy: the first in its order of those that run is never preempted, so there is always
progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from trine.core.types import Sequence

LOOK = 256  # waiting sequences that are looked at in one step, at most


class Cached(Protocol):
    """What a policy may ask of the cache."""

    def peek(self, seq: Sequence) -> int:
        """Tokens of it that the tree has."""
        ...


class Policy(Protocol):
    """A plugin file holds one, made without arguments."""

    def running(self, running: list[Sequence]) -> Iterable[Sequence]:
        """Those that run, in the order in which they are given tokens and pages. A copy."""
        ...

    def waiting(self, waiting: list[Sequence], cache: Cached) -> Iterable[Sequence]:
        """Those to admit, first ones first; at most LOOK. The first that does not fit ends it.

        `Sequence.waited` counts how often a younger one was admitted first."""
        ...

    def victim(self, running: list[Sequence], seq: Sequence) -> Sequence | None:
        """Whom to preempt so that `seq` gets pages: one that comes after it in `running`, None if nobody."""
        ...
