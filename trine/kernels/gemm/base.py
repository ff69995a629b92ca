"""The contract of a matrix product, in shapes: y = x W^T.

Weights are float32, bfloat16, float16, or int8. With int8 weights a product takes x as integers of 14 bits, each in two
digits of 7: x = 128 high + low. Both digits are multiplied by the weights as if they were two rows; their sums
are exact integers, and the result is the float32 nearest to the true sum. So every int8 product gives the
same numbers, and a row's result cannot depend on the rows beside it. Why two digits: with 8 bits on both sides
the rounding of x is most of the error (SmolLM2-135M, prose: 0.037 nats a token, against 0.005 of the weights
alone), and kernels without VNNI need twice the rows for 8 bits of x anyway. Scales are the business of `quant`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import Struct
from torch import Tensor

DIGIT = 128  # what a step of the high digit stands for; both digits are within -64..64
LARGEST = 8191  # magnitude of x: 64 * 128 - 1
INPUTS = 2064  # float32 holds every integer up to 2^24, and so many products of 64 x 127 sum to less
FLOATS = ("float32", "bfloat16", "float16")  # weights that are multiplied as they are


class Want(Struct, frozen=True):
    """What a model asks of its products."""

    weights: str  # int8, float32, bfloat16, float16
    invariant: bool = True  # a row's result must not depend, in any bit, on the rows beside it
    device: str = "cpu"  # or "cuda", "rocm": Facts.kind
    features: tuple[str, ...] = ()  # of the processor: Facts.features
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU: Facts.capability
    cores: int = 0  # multiprocessors of a GPU: Facts.cores; 0: not known


class Behind(NamedTuple):
    """What stands behind a product, made part of it."""

    residual: Tensor | None = None  # added; the result takes its place
    activation: str = ""  # of a gate: the weight has the rows of gate and up one below the other


class Product(Protocol):
    """A way to multiply. One object serves all layers: it may keep scratch memory.

    It may have `settle(rows)` too: called when waiting for the device is fine, before so many rows are recorded."""

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

    def multiply(self, x: Tensor, packed: Any, wide: bool = False) -> Tensor:
        """[rows, ins] -> [rows, outs] of x's dtype, or float32 if `wide`. Sums are in float32 at least.

        On a CPU x is float32. On a GPU its dtype is the weights', and nothing waits for the device.
        int8: |x| is at most LARGEST, and x is rounded to the nearest integer, ties to even."""
        ...


def not_cpu(want: Want) -> str | None:
    """What the products of a CPU say to other devices."""
    return None if want.device == "cpu" else f"is for a CPU, not {want.device}"


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


def digits(x: Tensor, unit: Tensor) -> Tensor:
    """[2 rows, ins]: the high digits, then the low ones; these are yet to be rounded.

    `unit` is 1 / DIGIT as a tensor: a number would be made one on each call."""
    rows, ins = x.shape
    both = x.new_empty(2 * rows, ins)
    high = both[:rows]
    torch.mul(x, unit, out=high).round_()
    torch.add(x, high, alpha=-DIGIT, out=both[rows:])
    return both


def total(parts: list[Tensor]) -> Tensor:
    """From sums of digits [2 rows, outs], by parts of the inputs: the float32 nearest to the true sum.

    One part rounds once, since 128 times a float32 is exact; several are summed in float64, where they are."""
    rows = len(parts[0]) // 2
    if len(parts) == 1:
        return parts[0][rows:].add_(parts[0][:rows], alpha=DIGIT)
    sum = parts[0][rows:].double().add_(parts[0][:rows], alpha=DIGIT)
    for part in parts[1:]:
        sum.add_(part[rows:]).add_(part[:rows], alpha=DIGIT)
    return sum.float()
