"""int8 products with torch._int_mm: int32 sums by the processor's own dot-product instructions."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import DIGIT, INPUTS, Want, digits, not_cpu, total


class IntMM:
    """int8 x int8 -> int32."""

    name = "int_mm"
    order = 10

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights != "int8":
            return f"is for int8 weights, not {want.weights}"
        if reason := not_cpu(want):
            return reason
        if not {"vnni", "amx"}.intersection(want.features):
            return "this CPU has neither VNNI nor AMX, without which it is 8-20 times slower than float32"
        return None

    def __init__(self, want: Want) -> None:
        self.unit = torch.tensor(1 / DIGIT)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def multiply(self, x: Tensor, packed: Tensor, wide: bool = False) -> Tensor:
        sums = torch.ops.aten._int_mm(digits(x, self.unit).round_().to(torch.int8), packed.t())
        if x.shape[-1] <= INPUTS:
            return total([sums.float()])
        return total([sums.double()]).float()


PLUGIN = IntMM
