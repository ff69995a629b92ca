"""The lower `Request.priority` first, and those of one priority by arrival; the last in that order makes room.

Strict: while there is enough of a lower value, a higher one waits. Nobody that runs is preempted
for one that waits, only so that one that goes before it can go on.
"""

from __future__ import annotations

from operator import attrgetter

from trine.core.types import Sequence

from .base import LOOK, Cached


class Priority:
    """Both lists come by arrival, and sorting keeps that order among equals."""

    def running(self, running: list[Sequence]) -> list[Sequence]:
        return sorted(running, key=_priority)

    def waiting(self, waiting: list[Sequence], cache: Cached) -> list[Sequence]:
        return sorted(waiting, key=_priority)[:LOOK]

    def victim(self, running: list[Sequence], seq: Sequence) -> Sequence | None:
        last = max(running, key=_rank)
        return last if _rank(last) > _rank(seq) else None


_priority = attrgetter("request.priority")
_rank = attrgetter("request.priority", "ticket")

PLUGIN = Priority
