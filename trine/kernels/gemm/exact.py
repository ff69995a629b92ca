"""int8 products carried in float32: a float32 product of integers is exact while its sums stay under 2^24.

Runs on any processor, with the speed of its float32 product. Inputs are cut so that no sum can pass 2^24.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import DIGIT, INPUTS, Scratch, Want, beside, digits, not_cpu, total


class Exact:
    """int8 values in float32 arithmetic."""

    name = "exact"
    order = 50

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights != "int8":
            return f"is for int8 weights, not {want.weights}"
        return not_cpu(want)

    def __init__(self, want: Want) -> None:
        self.scratch = Scratch()
        self.unit = torch.tensor(1 / DIGIT)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def multiply(self, x: Tensor, packed: Tensor, wide: bool = False) -> Tensor:
        inputs = digits(x, self.unit).round_().split(INPUTS, -1)
        return beside([self._part(inputs, part) for part in self.scratch.parts(packed)])

    def _part(self, inputs: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        weights = weight.split(INPUTS, -1)
        return total([F.linear(x, w) for x, w in zip(inputs, weights, strict=True)])


PLUGIN = Exact
