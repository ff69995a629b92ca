"""The longest cached prefix first, so that what is cached is used before it is evicted.

Ageing: who was passed over `PATIENCE` times goes before all others, the oldest first, and nobody is
admitted before it fits. So nobody starves.
"""

from __future__ import annotations

from trine.core.types import Sequence

from .base import LOOK, Cached

PATIENCE = 32  # younger ones admitted first


class Prefix:
    def running(self, running: list[Sequence]) -> list[Sequence]:
        return running[:]

    def waiting(self, waiting: list[Sequence], cache: Cached) -> list[Sequence]:
        seen = waiting[:LOOK]
        aged = [seq for seq in seen if seq.waited >= PATIENCE]
        rest = [(-cache.peek(seq), seq.ticket, seq) for seq in seen if seq.waited < PATIENCE]
        rest.sort(key=_rank)
        return aged + [seq for _, _, seq in rest]

    def victim(self, running: list[Sequence], seq: Sequence) -> Sequence | None:
        last = running[-1]
        return last if last.ticket > seq.ticket else None


def _rank(entry: tuple[int, int, Sequence]) -> tuple[int, int]:
    return entry[:2]


PLUGIN = Prefix
