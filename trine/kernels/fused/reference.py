"""Norms, rotation and gated activation in plain torch.

What keeps a row's bits its own: sums run over one row at a time; products, sums, roots and quotients are
rounded the same way wherever they stand. An exponential is not: torch computes the last few elements of a
run of memory by another formula than the rest (seen: 4 % of them differ in the last bit). So activations
go over rows that are not adjacent in memory, in calls too small to be cut up between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# torch cuts an elementwise operation up between threads from this many elements on.
GRAIN = 32768


class Reference:
    """Plain torch."""

    name = "reference"
    order = 100

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        return None

    def norm(self, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        scale = torch.add(eps, (x * x).sum(-1, keepdim=True), alpha=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))

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
