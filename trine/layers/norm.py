"""Root mean square norms: of a hidden state, with its residual; of heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trine.kernels.fused.base import Fused

from .part import Part


class Norm(Part):
    """Adds the residual, if there is one, and normalizes the sum."""

    def __init__(self, size: int, eps: float, fused: Fused) -> None:
        super().__init__()
        self.eps, self.fused = eps, fused
        self.weight = torch.empty(size)

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalized x + residual, x + residual); x None: nothing is to be added. Both are given away."""
        if x is None:
            return self.fused.norm(residual, self.weight, self.eps), residual
        return self.fused.add_norm(x, residual, self.weight, self.eps)

    def wants(self) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def put(self, name: str, tensor: Tensor) -> None:
        self.weight.copy_(tensor)


class HeadNorm(Part):
    """Weights of norms over the head dimension, one for each kind of head; kinds lie side by side.

    Attention applies them, while it turns the heads."""

    def __init__(self, heads: Sequence[int], head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = list(heads), eps
        self.weight = torch.empty(sum(heads), head_dim)

    def wants(self) -> dict[str, tuple[int, ...]]:
        return {f"{i}.weight": (self.weight.shape[1],) for i in range(len(self.heads))}

    def put(self, name: str, tensor: Tensor) -> None:
        kind = int(name.partition(".")[0])
        start = sum(self.heads[:kind])
        self.weight[start : start + self.heads[kind]] = tensor
