"""The gated feed-forward part: down(activation(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

from torch import Tensor, nn

from .linear import Linear
from .norm import Norm


class GatedMLP(nn.Module):
    """`up` holds gate and up, as parts 0 and 1."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    def forward(self, norm: Norm, x: Tensor | None, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """Of the norm of x + residual. x, in and out: what is not yet added to the residual."""
        x, residual = self.up.normed(norm, x, residual, self.activation)
        return self.down.added(x, residual)
