"""Weights in blocks of 32 inputs with a scale each: 4 bits as a GGUF file has them, else 8.

What a file keeps in 4 bits (Q4_0, Q4_1) or 8 (Q8_0) is kept exactly; all else is rounded to 8 bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trine.kernels.gemm.base import Behind
from trine.kernels.native.blocks import pack

from .base import Holder


class Blocks:
    """Parts are kept until all are there, then packed as one."""

    name = "blocks"

    def __init__(self, product: Any, dtype: str = "blocks") -> None:
        self.product = product

    def create(self, linear: Holder) -> None:
        linear.weight = []

    def load(self, linear: Holder, start: int, rows: Any) -> None:
        linear.weight.append((start, rows))

    def finish(self, linear: Holder) -> None:
        linear.weight = self.product.pack(pack(linear.weight, linear.outs, linear.ins))

    def tie(self, linear: Holder, weight: Any) -> None:
        linear.weight = self.product.pack(pack([(0, weight)], linear.outs, linear.ins))

    def apply(self, linear: Holder, x: Any, wide: bool = False) -> Any:
        return self.product.multiply(x, linear.weight, wide)

    def fuse(
        self, linear: Holder, x: Tensor, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor | None:
        return None

    def dequantize(self, linear: Holder) -> Tensor:
        return self.product.unpack(linear.weight)


PLUGIN = Blocks
