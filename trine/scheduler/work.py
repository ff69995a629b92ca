"""What the scheduler keeps while it puts one batch together, and what it counts for all its life."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from trine.cache.manager import View
from trine.core.stats import StepStats
from trine.core.types import Copy, Grant, Join, Row, Sequence, Write

from .mix import Mix


@dataclass(slots=True)
class Work:
    """One batch while it is being put together."""

    left: int  # budget, in tokens
    grants: list[Grant]
    rows: list[Row] = field(default_factory=list[Row])
    seqs: list[Sequence] = field(default_factory=list[Sequence])  # by row
    joins: list[Join] = field(default_factory=list[Join])
    copies: list[Copy] = field(default_factory=list[Copy])
    writes: list[Write] = field(default_factory=list[Write])
    owed: list[int] | None = None  # by group: pages that those who run will surely still need
    preempted: bool = False
    mix: Mix | None = None  # set if this step has rows of one token that prompts must not hold up
    room: float = 0.0  # work that prompts may still add, with `mix`
    kept: int = 0  # of `left`, for rows of one token that are still to come, with `mix`
    chunks: int = 0  # of prompts, so far

    def chunk(self, start: int, gap: int) -> int:
        """How much of a prompt's gap to close in this step; 0: nothing. The first chunk is never
        shorter than the least there is, so that each step of a prompt brings it on."""
        mix = self.mix
        if mix is None:
            return min(gap, self.left)
        count = min(gap, self.left - self.kept, mix.chunk(self.room, start))
        if count >= min(gap, mix.least):
            return count
        return 0 if self.chunks else min(gap, mix.least, self.left)

    @property
    def more(self) -> bool:
        """Whether a prompt may still be begun."""
        worth = self.mix is None or not self.chunks or self.room >= self.mix.least
        return self.left > 0 and worth

    def took(self, start: int, count: int) -> None:
        """A chunk of a prompt is in the batch."""
        self.chunks += 1
        if self.mix is not None:
            self.room -= self.mix.cost(start, count)


@dataclass(slots=True)
class Counts:
    """What StepStats counts, for the life of the engine."""

    steps: int = 0
    prompt: int = 0
    hit: int = 0
    computed: int = 0
    output: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0

    def add(self, told: StepStats, view: View) -> StepStats:
        """What is told of the moment, with memory and all that was counted."""
        return replace(
            told,
            step=self.steps,
            pages=view.pages,
            held=view.held,
            cached=view.cached,
            reserved_tokens=view.reserved,
            used_tokens=view.used,
            prompt_tokens=self.prompt,
            hit_tokens=self.hit,
            computed_tokens=self.computed,
            output_tokens=self.output,
            preemptions=self.preemptions,
            finished=self.finished,
            aborted=self.aborted,
        )
