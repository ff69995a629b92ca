"""Weights as they are, in float32, bfloat16 or float16. Arithmetic is the product's business."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.kernels.gemm.base import Behind

from .base import Holder


class Plain:
    """Weights as numbers. 16 bits halve the memory: they round only what the checkpoint has finer."""

    name = "none"

    def __init__(self, product: Any, dtype: str) -> None:
        self.product = product
        self.dtype = getattr(torch, dtype)
        self.fuses = hasattr(product, "fuse")  # optional, of a product

    def create(self, linear: Holder) -> None:
        linear.weight = torch.empty(linear.outs, linear.ins, dtype=self.dtype)

    def load(self, linear: Holder, start: int, rows: Tensor) -> None:
        linear.weight[start : start + len(rows)] = rows

    def finish(self, linear: Holder) -> None:
        linear.weight = self.product.pack(linear.weight)

    def tie(self, linear: Holder, weight: Tensor) -> None:
        linear.weight = self.product.pack(weight.to(self.dtype))

    def apply(self, linear: Holder, x: Tensor, wide: bool = False) -> Tensor:
        return self.product.multiply(x, linear.weight, wide)

    def fuse(
        self, linear: Holder, x: Tensor, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor | None:
        return self.product.fuse(x, linear.weight, norm, behind) if self.fuses else None

    def dequantize(self, linear: Holder) -> Tensor:
        return self.product.unpack(linear.weight).float()


PLUGIN = Plain
