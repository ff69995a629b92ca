"""The contract of a matrix product, in shapes: y = x W^T.

Weights are float32, bfloat16, or int8. Of int8 weights a product gives exact integer sums: x is rounded to
the nearest integer (ties to even), and the result is the float32 nearest to the true sum. So every int8
product gives the same numbers, and a row's result cannot depend on the rows beside it. Scales are the
business of `quant`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor

# float32 holds every integer up to 2^24, and 1,040 products of 127 x 127 sum to less.
EXACT_INPUTS = 1040


class Want(Struct, frozen=True):
    """What a model asks of its products."""

    weights: str  # int8, float32, bfloat16
    invariant: bool = True  # a row's result must not depend, in any bit, on the rows beside it
    device: str = "cpu"
    features: tuple[str, ...] = ()  # of the processor: Facts.features


class Product(Protocol):
    """A way to multiply. One object serves all layers: it may keep scratch memory."""

    name: str
    order: int

    @classmethod
    def cannot(cls, want: Want) -> str | None: ...

    def __init__(self, want: Want) -> None: ...

    def pack(self, weight: Tensor) -> Any:
        """[outs, ins] -> what `multiply` wants."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """The weight again, exactly."""
        ...

    def multiply(self, x: Tensor, packed: Any) -> Tensor:
        """[rows, ins] float32 -> [rows, outs] float32. int8: |x| is at most 127 (to rounding)."""
        ...


class Scratch:
    """Weights that are stored small and multiplied as float32: converted a part at a time.

    A part stays in the processor's cache, so that memory is only read as small as it is stored (measured
    with two cores at one row of 576 x 49,152: 6 ms in parts of 4 MiB, 17 ms whole, 8 ms kept in float32)."""

    elements = 2**20

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def parts(self, weight: Tensor) -> Iterator[Tensor]:
        """Runs of rows in float32. Each is overwritten by the next."""
        if weight.dtype == torch.float32:
            yield weight
            return
        rows = max(1, self.elements // weight.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = weight[start : start + rows]
            if part.numel() > self.memory.numel():
                self.memory = torch.empty(part.numel())
            yield self.memory[: part.numel()].view(part.shape).copy_(part)


def beside(parts: list[Tensor]) -> Tensor:
    """Parts of the outputs, as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def total(parts: list[Tensor]) -> Tensor:
    """The float32 nearest to the true sum of integers: of two, one addition rounds once; more are
    summed in float64, where they are exact."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return parts[0].add_(parts[1])
    sum = parts[0].double()
    for part in parts[1:]:
        sum.add_(part)
    return sum.float()
