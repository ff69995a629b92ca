"""Batch -> Step -> model -> logits. One ragged layout for every kind of row.

It knows the table's arithmetic and nothing of what a model or a backend does with a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trine.core.types import Row
from trine.kernels.attention.base import Attention, Bounds, Step

from .table import Table


class Runner:
    """Runs rows of the table through the model."""

    def __init__(self, table: Table, attention: list[Attention], model: Callable[[Step], Tensor]) -> None:
        self.table = table
        self.attention = attention  # by KV group
        self.model = model

    def run(self, rows: list[Row]) -> Tensor:
        """Logits [rows that sample, vocab] float32; the rows' tokens then have KV."""
        step = self.prepare(rows)
        step = step._replace(attention=[backend.plan(step) for backend in self.attention])
        logits = self.model(step)
        self.table.computed[step.slots] = step.lengths
        for row in rows:
            self.table.reach[row.slot] += row.count
        return logits

    def prepare(self, rows: list[Row]) -> Step:
        """What the model sees, gathered from the table."""
        table, device = self.table, self.table.known.device
        each = [row.count for row in rows]
        total, length = sum(each), max(table.reach[row.slot] + row.count for row in rows)
        singles = each.count(1)
        slots = torch.tensor([row.slot for row in rows], device=device)
        counts = torch.tensor(each, device=device)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=device)
        torch.cumsum(counts, 0, out=starts[1:])
        computed = table.computed[slots]
        owner = torch.repeat_interleave(counts, output_size=total)  # [tokens] the row of each
        positions = torch.arange(total, device=device) + (computed - starts[:-1])[owner]
        owners = slots[owner]
        place, offset = positions // table.page_size, positions % table.page_size
        return Step(
            ids=table.tokens[owners, positions].long(),
            positions=positions,
            write=[pages[owners, place] * table.page_size + offset for pages in table.pages],
            starts=starts,
            lengths=computed + counts,
            pages=table.pages,
            wanted=starts[1:][torch.tensor([row.sample for row in rows], device=device)] - 1,
            slots=slots,
            singles=singles,
            attention=[],
            bound=Bounds(total, max(each), length),
        )
