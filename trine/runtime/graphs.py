"""Steps of single tokens as recorded graphs, one for each bucket of rows.

A graph's only input is which slots its rows are; everything else is gathered on the device. Rows that fill a
bucket up are slot 0's. Steps may be of several kinds (backends attend in another way while there are shared
runs): each kind has graphs of its own. A bucket is first run eagerly, for real, which compiles what it needs, and
recorded the next time it comes. Before both, `settle` may measure what is best for so many rows: it waits for the
device, and what it chose stays. It does not know what a step computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Recorded(NamedTuple):
    slots: Tensor  # [bucket] int32, its input
    captured: Any  # platforms.base.Captured; its value are the logits


class Graphs:
    """`run(slots) -> logits` is what is recorded; `graph` records it (platforms.base.Graph), `buckets` ascend."""

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        graph: Any,
        buckets: list[int],
        device: torch.device,
        settle: Callable[[int], None] | None = None,
    ) -> None:
        self.run, self.graph, self.buckets, self.device = run, graph, buckets, device
        self.settle = settle  # what takes a number of rows
        self.recorded: dict[tuple[int, Hashable], Recorded] = {}  # by bucket and kind
        self.met: set[tuple[int, Hashable]] = set()  # what ran eagerly

    def bucket(self, rows: int) -> int | None:
        """The smallest that holds so many rows; None if none does."""
        at = bisect_left(self.buckets, rows)
        return self.buckets[at] if at < len(self.buckets) else None

    def logits(self, slots: Tensor, rows: int, kind: Hashable = None) -> Tensor:
        """slots [bucket]: the rows' and slot 0 behind them -> logits [rows, vocab], until the next call."""
        key = len(slots), kind
        if found := self.recorded.get(key):
            if found.slots is not slots:
                found.slots.copy_(slots)
            found.captured.replay()
            return found.captured.value[:rows]
        if self.settle is not None:
            self.settle(len(slots))
        if key not in self.met:
            self.met.add(key)
            return self.run(slots)[:rows]
        return self._record(key, slots)[:rows]

    def warm(self, fill: Callable[[int], Tensor], kind: Hashable = None) -> int:
        """Record all buckets that are not yet; `fill(bucket)` gives slots that are all 0. How many there are."""
        for bucket in reversed(self.buckets):
            while (bucket, kind) not in self.recorded:
                self.logits(fill(bucket), bucket, kind)
        return len(self.recorded)

    def _record(self, key: tuple[int, Hashable], slots: Tensor) -> Tensor:
        mine = slots.clone()
        captured = self.graph.capture(lambda: self.run(mine))
        self.recorded[key] = Recorded(mine, captured)
        captured.replay()
        return captured.value
