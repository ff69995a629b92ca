"""Products whose bits do not depend on the number of rows, on a GPU.

One tile shape serves any number of rows, and sums over the inputs are cut in segments that only the weight's
size decides. With few rows, segments go to different multiprocessors; with many, one program does them all:
both add them in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trine.kernels.installed import missing

from .base import FLOATS, Behind, Want
from .choice import cdiv
from .tiles import CORES, Shape, Tiles

SHAPE = Shape(rows=128, outs=128, ins=64, warps=8, stages=4)
WIDE = Shape(rows=64, outs=64, ins=32, warps=4, stages=2)  # float32: no tensor cores, twice the bytes
SMALL = 512  # inputs of a segment, at least


class Fixed:
    """One order of sums."""

    name = "fixed"
    order = 30

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights not in FLOATS:
            return f"is for float weights, not {want.weights}"
        if want.device not in ("cuda", "rocm"):
            return f"is for GPUs, not {want.device}"
        return missing("triton")

    def __init__(self, want: Want) -> None:
        self.shape = WIDE if want.weights == "float32" else SHAPE
        if want.device == "rocm":
            self.shape = self.shape._replace(stages=2)  # 64 KiB of shared memory
        elif want.capability < (9, 0):
            self.shape = self.shape._replace(stages=min(3, self.shape.stages))
        self.tiles = Tiles(want)

    def pack(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def multiply(self, x: Tensor, packed: Tensor, wide: bool = False) -> Tensor:
        outs, ins = packed.shape
        out = x.new_empty(len(x), outs, dtype=torch.float32 if wide else x.dtype)
        if not len(x):
            return out
        segments = max(1, min(CORES // cdiv(outs, self.shape.outs), ins // SMALL))
        return self.tiles.product(x.contiguous(), packed, out, self.shape, segments, Behind())


PLUGIN = Fixed
