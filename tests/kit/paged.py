"""Rows over a paged store, without a scheduler: scattered pages, and NaN wherever nothing was written.

    rows = Paged(kinds=[Kind(kv_heads=2, head_dim=16)], layers=[0, 0], page_size=4)
    step = rows.step([(0, 5), (1, 3)])     # row 0 computes its next 5 tokens, row 1 its next 3

It stands in for the table and the store of the runtime where only model parts are tested.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from trine.kernels.attention.base import Bounds, Step


class Kind(NamedTuple):
    """Of KV: what its layers keep."""

    kv_heads: int
    head_dim: int
    window: int = 0


class Paged:
    """Rows are numbered from 0 and begin empty. It is also the store."""

    def __init__(
        self,
        kinds: list[Kind],
        layers: list[int],
        page_size: int = 16,
        pages: int = 400,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.kinds, self.layers, self.page_size = kinds, layers, page_size
        nothing = float("nan")
        self.kv = [
            tuple(
                torch.full((pages, page_size, kinds[g].kv_heads, kinds[g].head_dim), nothing, dtype=dtype)
                for _ in "kv"
            )
            for g in layers
        ]
        draw = random.Random(seed)
        self.free = [draw.sample(range(1, pages), pages - 1) for _ in kinds]
        self.pages: dict[int, list[list[int]]] = {}  # by row, by group
        self.lengths: dict[int, int] = {}

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.kv[layer]

    def fork(self, row: int, new: int) -> None:
        """`new` is a row that found all of `row` in the cache; whole pages must be full."""
        assert self.lengths[row] % self.page_size == 0
        self.pages[new] = [list(pages) for pages in self.pages[row]]
        self.lengths[new] = self.lengths[row]

    def step(self, counts: list[tuple[int, int]], ids: dict[int, list[int]] | None = None) -> Step:
        """Each named row computes so many of its next tokens; `ids` has all tokens of each row."""
        starts, positions, tokens = [0], [], []
        for row, count in counts:
            first = self.lengths.get(row, 0)
            self._grow(row, first + count)
            starts.append(starts[-1] + count)
            positions += range(first, first + count)
            tokens += ids[row][first : first + count] if ids else [0] * count
            self.lengths[row] = first + count
        owners = [row for row, count in counts for _ in range(count)]
        size = self.page_size
        lengths = [self.lengths[row] for row, _ in counts]
        singles = sum(count == 1 for _, count in counts)
        assert all(count == 1 for _, count in counts[:singles]), "rows of one token come first"
        return Step(
            ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            write=[
                torch.tensor(
                    [
                        self.pages[r][g][p // size] * size + p % size
                        for r, p in zip(owners, positions, strict=True)
                    ]
                )
                for g in range(len(self.kinds))
            ],
            starts=torch.tensor(starts),
            lengths=torch.tensor(lengths),
            pages=[self._table(group) for group in range(len(self.kinds))],
            wanted=torch.arange(len(tokens)),
            slots=torch.tensor([row + 1 for row, _ in counts]),
            singles=singles,
            attention=[],
            bound=Bounds(len(tokens), max(count for _, count in counts), max(lengths)),
        )

    def _table(self, group: int) -> Tensor:
        """The page table of all rows there are, by slot: a row's number and one."""
        width = max(len(pages[group]) for pages in self.pages.values())
        table = torch.zeros(max(self.pages) + 2, width, dtype=torch.int64)
        for row, pages in self.pages.items():
            table[row + 1, : len(pages[group])] = torch.tensor(pages[group])
        return table

    def _grow(self, row: int, length: int) -> None:
        for group, pages in enumerate(self.pages.setdefault(row, [[] for _ in self.kinds])):
            while len(pages) * self.page_size < length:
                pages.append(self.free[group].pop())
            if window := self.kinds[group].window:
                self._drop(group, pages, self.lengths.get(row, 0) - window + 1)

    def _drop(self, group: int, pages: list[int], seen: int) -> None:
        """Pages that lie wholly before the first position that is still seen go back, and are overwritten."""
        for i in range(max(0, seen) // self.page_size):
            if pages[i]:
                for layer, g in enumerate(self.layers):
                    if g == group:
                        for tensor in self.kv[layer]:
                            tensor[pages[i]] = float("nan")
                pages[i] = 0
