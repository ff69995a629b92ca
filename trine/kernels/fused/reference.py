"""Norms, rotation and gated activation in plain torch.

What keeps a row's bits its own: sums run over one row at a time; products, sums, roots and quotients are
rounded the same way wherever they stand. An exponential is not: torch computes the last few elements of a
run of memory by another formula than the rest (seen: 4 % of them differ in the last bit). So activations
go over rows that are not adjacent in memory, in calls too small to be cut up between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import HeadNorm, Heads, Places, Want

# torch cuts an elementwise operation up between threads from this many elements on.
GRAIN = 32768


class Turn(NamedTuple):
    """Of a step's tokens."""

    cos: Tensor  # [tokens, 1, dim]
    sin: Tensor  # [tokens, 1, dim]  its first half is negative


class Reference:
    """Plain torch."""

    name = "reference"
    order = 100

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        return None if want.device == "cpu" else f"is for a CPU, not {want.device}"

    def __init__(self, want: Want | None = None) -> None:
        self.numbers: dict[float, Tensor] = {}  # torch makes a tensor of a number on each call: made once

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if (base := self.numbers.get(eps)) is None:
            base = self.numbers[eps] = torch.tensor(eps)
        scale = torch.add(base, (x * x).sum(-1, keepdim=True), alpha=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.add_(residual)
        return self.norm(x, weight, eps), x

    def turn(self, table: Tensor, positions: Tensor) -> Turn:
        return Turn(*table.index_select(0, positions).unsqueeze(1).chunk(2, -1))

    def place(self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, turn: Turn, places: Places) -> Tensor:
        both = heads.queries + heads.keys
        qk, v = qkv.split([both * heads.dim, heads.keys * heads.dim], -1)
        qk = qk.view(len(qk), both, heads.dim)
        if norm:
            qk = self.norm(qk, *norm)
        qk = self.rotate(qk, turn)
        if not v.is_cpu:
            v = v.nan_to_num()
        for store, new in ((places.keys, qk[:, heads.queries :]), (places.values, v)):
            new = new.reshape(len(v), heads.keys, heads.dim).to(store.dtype)
            store.flatten(0, 1).index_copy_(0, places.write, new)
        return qk[:, : heads.queries]

    def rotate(self, x: Tensor, turn: Turn) -> Tensor:
        """x [tokens, heads, dim]."""
        return (x * turn.cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(turn.sin))

    def gated(self, x: Tensor, activation: str) -> Tensor:
        size = x.shape[-1] // 2
        gate, up = x[:, :size], x[:, size:]
        act = ACTIVATIONS[activation]
        rows = max(1, GRAIN // size)
        if len(x) <= rows:
            return act(gate).mul_(up)
        return torch.cat([act(part) for part in gate.split(rows)]).mul_(up)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu}

PLUGIN = Reference
