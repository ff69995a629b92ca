"""Rows of the table -> Step -> model -> logits. One ragged layout for every kind of row.

A step in which every row computes and samples one token is the same work for any rows: it is gathered on the
device from the slots alone, and may be a recorded graph. It knows nothing of what a model or a backend does with
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trine.core.types import Row
from trine.kernels.attention.base import Attention, Bounds, Step

from .graphs import Graphs
from .table import Table


class Runner:
    """Runs rows of the table through the model.

    `graph` (platforms.base.Graph, or None) records steps of single tokens for `buckets` of rows; `settle`: see
    `graphs`. `lean`: up to so many single tokens are gathered from their slots alone, though nothing is recorded."""

    def __init__(
        self,
        table: Table,
        attention: list[Attention],
        model: Callable[[Step], Tensor],
        graph: Any = None,
        buckets: Sequence[int] = (),
        settle: Callable[[int], None] | None = None,
        lean: int = 0,
    ) -> None:
        self.table, self.model = table, model
        self.attention = attention  # by KV group
        device = table.state.arena.device
        usable = graph and buckets
        self.graphs = Graphs(self._singles, graph, list(buckets), device, settle) if usable else None
        self.lean = lean
        kind = torch.int64 if device.type == "cpu" else torch.int32
        self.starts = torch.arange(max(*buckets, lean, 1) + 1, dtype=kind, device=device)

    def run(self, rows: list[Row]) -> Tensor:
        """Logits [rows that sample, vocab] float32; the rows' tokens then have KV. Rows of one token come first."""
        if (self.graphs or len(rows) <= self.lean) and all(row.count == 1 and row.sample for row in rows):
            bucket = self.graphs.bucket(len(rows)) if self.graphs else len(rows)
            if bucket is not None:
                slots = self.table.slots([row.slot for row in rows], bucket)
                self.table.reached(rows)
                if self.graphs is None:
                    return self._singles(slots)
                return self.graphs.logits(slots, len(rows), self._kind())
        return self._model(self.table.gather(rows))

    def warm(self) -> int:
        """Record all graphs there may be, of both kinds of step; how many there are."""
        if self.graphs is None:
            return 0
        count, now = 0, [backend.shares_now for backend in self.attention]
        for shared in sorted({False, *(backend.may_share for backend in self.attention)}):
            for backend in self.attention:
                backend.shares_now = shared and backend.may_share
            count = self.graphs.warm(lambda bucket: self.table.slots([], bucket), self._kind())
        for backend, shares_now in zip(self.attention, now, strict=True):
            backend.shares_now = shares_now
        return count

    def _kind(self) -> tuple[bool, ...]:
        """Backends may attend in another way while rows share runs of pages."""
        return tuple(backend.shares_now for backend in self.attention)

    def nobody(self, rows: int) -> Tensor:
        """A step of rows that have no tenant, eagerly."""
        return self._singles(self.table.slots([], rows))

    def _singles(self, slots: Tensor) -> Tensor:
        """Logits [slots, vocab] of each slot's next token. No number of it is known to the host."""
        rows, table = len(slots), self.table
        seen = table.singles(slots)
        return self._model(
            Step(
                ids=seen.ids,
                positions=seen.positions,
                write=seen.write,
                starts=self.starts[: rows + 1],
                lengths=seen.lengths,
                pages=table.pages,
                wanted=None,
                slots=slots,
                singles=rows,
                attention=[],
                bound=Bounds(rows, 1, table.max_len),
            )
        )

    def _model(self, step: Step) -> Tensor:
        return self.model(step._replace(attention=[backend.plan(step) for backend in self.attention]))
