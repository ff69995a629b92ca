"""The gated feed-forward part: down(activation(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

from torch import Tensor, nn

from trine.kernels.fused.base import Fused

from .linear import Linear


class GatedMLP(nn.Module):
    """`up` holds gate and up, as parts 0 and 1."""

    def __init__(self, up: Linear, down: Linear, activation: str, fused: Fused) -> None:
        super().__init__()
        self.up, self.down, self.activation, self.fused = up, down, activation, fused

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.fused.gated(self.up(x), self.activation))
