"""int8 weights with a scale for each output; activations in two 7-bit digits with a scale for each row.

Both scales are symmetric and from the largest magnitude. What is multiplied are integers, and their sums are
exact: a row's result depends on nothing but the row. One row's outliers cost only that row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.kernels.gemm.base import LARGEST as LARGEST_INPUT
from trine.kernels.gemm.base import Behind

from .base import Holder

LARGEST = 127  # of weights
TINY = 1e-30  # keeps a row of zeros finite; too small to move any other scale


class Int8:
    """Weights in 8 bits."""

    name = "int8"

    def __init__(self, product: Any, dtype: str = "int8") -> None:
        self.product = product
        self.tiny = torch.tensor(TINY)

    def create(self, linear: Holder) -> None:
        linear.weight = torch.empty(linear.outs, linear.ins, dtype=torch.int8)
        linear.scale = torch.empty(linear.outs)

    def load(self, linear: Holder, start: int, rows: Tensor) -> None:
        assert linear.scale is not None
        for i in range(
            0, len(rows), 4096
        ):  # a run at a time: the float32 copy of a whole vocabulary is large
            part = rows[i : i + 4096].float()
            scale = self._scale(part, LARGEST)
            where = slice(start + i, start + i + len(part))
            linear.weight[where] = (part / scale).round_().clamp_(-LARGEST, LARGEST)
            linear.scale[where] = scale[:, 0]

    def finish(self, linear: Holder) -> None:
        linear.weight = self.product.pack(linear.weight)

    def tie(self, linear: Holder, weight: Tensor) -> None:
        self.create(linear)
        self.load(linear, 0, weight)
        self.finish(linear)

    def apply(self, linear: Holder, x: Tensor, wide: bool = False) -> Tensor:
        scale = self._scale(x, LARGEST_INPUT)
        return self.product.multiply(x / scale, linear.weight).mul_(scale).mul_(linear.scale)

    def fuse(
        self, linear: Holder, x: Tensor, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor | None:
        return None

    def dequantize(self, linear: Holder) -> Tensor:
        assert linear.scale is not None
        return self.product.unpack(linear.weight).float().mul_(linear.scale[:, None])

    def _scale(self, rows: Tensor, largest: int) -> Tensor:
        """[rows, 1]: what 1 stands for in each row."""
        return torch.add(self.tiny, rows.abs().amax(-1, keepdim=True), alpha=1 / largest)


PLUGIN = Int8
