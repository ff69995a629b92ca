"""Looks at each batch as it is launched: what the device was told to share, and how much of prompts rides along.

It sees the scheduler's lists and nothing of how they came about.
"""

from __future__ import annotations

from trine.cache.manager import Cache
from trine.core.types import Batch, Sequence
from trine.scheduler.scheduler import Scheduler

from .shares import expected, same


class Watch:
    """`group`: one that keeps every position; None: there is none."""

    def __init__(self, scheduler: Scheduler, cache: Cache, group: int | None) -> None:
        self.scheduler, self.cache, self.group = scheduler, cache, group
        self.begun: dict[int, tuple[Sequence, int]] = {}  # by slot: who has sampled there, in which life

    def __call__(self, batch: Batch) -> None:
        self._shares(batch)
        if self.scheduler.mix is not None:
            self._mix(batch)

    def _shares(self, batch: Batch) -> None:
        running, told = self.scheduler.running, self.scheduler.told
        wanted = [] if self.group is None else expected(running, self.group, self.cache.shortest)
        assert batch.shares is None or batch.shares == told
        assert same(told, wanted), f"told of {told}, and there is {wanted}"

    def _mix(self, batch: Batch) -> None:
        """Beside rows of one token prompts add at most a plain step each, or one chunk of the least there is."""
        mix, running = self.scheduler.mix, {seq.slot: seq for seq in self.scheduler.running}
        assert mix is not None
        steady = {slot for slot, seq in running.items() if self.begun.get(slot) == (seq, seq.life)}
        chunks = [row for row in batch.rows if row.slot not in steady]
        prompts = len(running) - len(steady) + len(self.scheduler.waiting)
        work = 0.0
        for row in chunks:
            start = running[row.slot].planned - row.count
            work += row.count * (1 + mix.reach * (start + row.count / 2))
        if steady and work > mix.ridge * prompts + 1e-6:
            assert len(chunks) == 1 and chunks[0].count <= mix.least, f"{work} of {prompts} prompts: {chunks}"
        for row in batch.rows:
            if row.sample:
                self.begun[row.slot] = running[row.slot], running[row.slot].life
