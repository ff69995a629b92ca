"""The contract of the small operations around the products: norms, rotation, gated activation.

Each works on rows, and a row's result must not depend, in any bit, on the rows beside it.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Fused(Protocol):
    """One object serves all layers."""

    name: str
    order: int

    @classmethod
    def cannot(cls, want: Any) -> str | None: ...

    def norm(self, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        """Root mean square over the last dimension, times a weight that fits the last ones."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [tokens, heads, dim], turned in the planes (i, i + dim / 2).

        cos and sin are [tokens, 1, dim]; the first half of sin is negative."""
        ...

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """x [tokens, 2 n] is gate and up side by side -> activation(gate) * up."""
        ...
