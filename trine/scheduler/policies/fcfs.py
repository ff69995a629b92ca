"""First come, first served; the last come makes room."""

from __future__ import annotations

from trine.core.types import Sequence

from .base import LOOK, Cached


class Fcfs:
    def running(self, running: list[Sequence]) -> list[Sequence]:
        return running[:]

    def waiting(self, waiting: list[Sequence], cache: Cached) -> list[Sequence]:
        return waiting[:LOOK]

    def victim(self, running: list[Sequence], seq: Sequence) -> Sequence | None:
        last = running[-1]
        return last if last.ticket > seq.ticket else None


PLUGIN = Fcfs
