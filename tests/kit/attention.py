"""Slots with KV in scattered pages, and what attention over them must give by the plain formula."""

from __future__ import annotations

import random
from typing import Any

import torch

from trine.core.types import Share
from trine.kernels.attention.base import Bounds, Step, Want

SLOTS = 12


class World:
    """Slots with random KV in scattered pages; NaN wherever nothing was written, but the largest number in values that
    may be copied by pages. It is the store. Indices are of 64 bits on a CPU, of 32 elsewhere."""

    def __init__(
        self,
        want: Want,
        seed: int = 0,
        length: int = 700,
        dtype: torch.dtype = torch.float32,
        slots: int = SLOTS,
        device: str = "cpu",
    ) -> None:
        self.want, self.draw, self.device = want, random.Random(seed), device
        torch.manual_seed(seed)
        size = want.page_size
        self.width = -(-length // size)
        pages = slots * self.width + 1
        shape = (pages, size, want.kv_heads, want.head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), device=device).to(dtype) for _ in "kv")
        if dtype in (torch.bfloat16, torch.float16):
            self.v.fill_(torch.finfo(dtype).max)
        self.free = self.draw.sample(range(1, pages), pages - 1)
        self.pages = torch.full((slots, self.width), 2**20)  # what must not be read faults
        self.lengths = [0] * slots
        self.shares: list[Share] = []

    def layer(self, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def fill(self, slot: int, length: int) -> None:
        size, begin = self.want.page_size, self.lengths[slot]
        for page in range(-(-begin // size), -(-length // size)):
            self.pages[slot, page] = self.free.pop()
        position = torch.arange(begin, length)
        page, place = self.pages[slot, position // size].to(self.device), (position % size).to(self.device)
        for kv in (self.k, self.v):
            kv[page, place] = torch.randn(length - begin, *kv.shape[2:], device=self.device).to(kv.dtype)
        self.lengths[slot] = length

    def common(self, slots: list[int], first: int, count: int) -> None:
        """Pages first..first + count are the same for all of them."""
        size = self.want.page_size
        for slot in slots:
            assert self.lengths[slot] == first * size
        self.fill(slots[0], (first + count) * size)
        for slot in slots[1:]:
            self.pages[slot, first : first + count] = self.pages[slots[0], first : first + count]
            self.lengths[slot] = (first + count) * size
        self.shares.append(Share(first, count, slots))

    def step(self, rows: list[tuple[int, int]]) -> Step:
        """(slot, count) of each row, those of one token first; its KV is written already."""
        counts = [count for _, count in rows]
        lengths = [self.lengths[slot] for slot, _ in rows]
        singles = sum(count == 1 for count in counts)
        starts = torch.tensor([0, *counts]).cumsum(0)
        known = starts, torch.tensor(lengths), self.pages, torch.tensor([slot for slot, _ in rows])
        kind = torch.int64 if self.device == "cpu" else torch.int32
        starts, seen, pages, slots = (x.to(self.device, kind) for x in known)
        nothing = torch.zeros(0, dtype=kind, device=self.device)
        bound = Bounds(sum(counts), max(counts), max(lengths))
        return Step(nothing, nothing, [nothing], starts, seen, [pages], nothing, slots, singles, [], bound)

    def expected(self, q: torch.Tensor, step: Step, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """In float64 [tokens, heads * head_dim]; a row at a time."""
        want, out = self.want, []
        share, size = want.heads // want.kv_heads, want.page_size
        scale = want.head_dim**-0.5 if want.scale is None else want.scale
        starts, lengths = step.starts.tolist(), step.lengths.tolist()
        for row, slot in enumerate(step.slots.tolist()):
            length, count = lengths[row], starts[row + 1] - starts[row]
            last = torch.arange(length - count, length)[:, None]
            low = max(0, length - count - want.window + 1) if want.window else 0
            t = torch.arange(low, length)
            page, place = self.pages[slot, t // size].to(self.device), (t % size).to(self.device)
            k = self.k[page, place].double().repeat_interleave(share, 1)
            v = self.v[page, place].double().repeat_interleave(share, 1)
            score = torch.einsum("qhd,thd->qht", q[starts[row] : starts[row + 1]].double(), k) * scale
            if want.softcap:
                score = want.softcap * torch.tanh(score / want.softcap)
            hidden = (t > last) | (t <= last - want.window) if want.window else t > last
            score = score.masked_fill(hidden[:, None].to(self.device), -float("inf"))
            if sinks is not None:
                score = torch.cat([score, sinks.double()[None, :, None].expand(count, -1, -1)], 2)
            out.append(torch.einsum("qht,thd->qhd", score.softmax(-1)[..., : len(t)], v).flatten(1))
        return torch.cat(out)


def want(**more: Any) -> Want:
    given: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 4, "invariant": False}
    return Want(**(given | more))
