"""Float products on a GPU: the vendor's library as torch calls it, and Triton where few rows make it faster.

One row is a GEMV, up to FEW rows stream the weights once through narrow tiles; with more, the library wins.
Results may depend, in their last bits, on the number of rows.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import FLOATS, Behind, Want
from .tiles import CORES, Shape, Tiles, cdiv, power

FEW = 64  # rows up to which tiles of W are streamed
INPUTS = 32768  # of a GEMV: what a program holds in registers
BURST = 16384  # bytes of W that a program of a GEMV asks for at once
SMALL = 512  # inputs of a segment, at least


class Vendor:
    """torch's linear, with Triton for few rows."""

    name = "vendor"
    order = 20

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights not in FLOATS:
            return f"is for float weights, not {want.weights}"
        if want.device not in ("cuda", "rocm"):
            return f"is for GPUs, not {want.device}"
        return "its sums depend on the number of rows" if want.invariant else None

    def __init__(self, want: Want) -> None:
        self.tiles = Tiles(want) if find_spec("triton") else None
        self.cores = want.cores or CORES
        self.stages = 4 if want.device == "cuda" else 2  # 64 KiB of shared memory on AMD's
        self.few = FEW if want.weights != "float32" else 1  # tensor cores do not take float32
        self.mixed = _mixes(getattr(torch, want.weights))

    def pack(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def multiply(self, x: Tensor, packed: Tensor, wide: bool = False) -> Tensor:
        if self._narrow(x, packed):
            out = x.new_empty(len(x), len(packed), dtype=torch.float32 if wide else x.dtype)
            return self._few(x, packed, out, None, Behind())
        if wide and x.dtype != torch.float32:
            if self.mixed:
                return torch.mm(x, packed.t(), out_dtype=torch.float32)
            return torch.mm(x, packed.t()).float()
        return F.linear(x, packed)

    def fuse(
        self, x: Tensor, packed: Tensor, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor | None:
        """The product with the norm of x before it and a residual or a gated activation behind it, in one
        launch; None: not for these sizes, do it in separate steps. A residual is updated in place."""
        if not self._narrow(x, packed) or (norm is not None and len(x) > 1):
            return None
        outs = len(packed) // 2 if behind.activation else len(packed)
        out = behind.residual if behind.residual is not None else x.new_empty(len(x), outs)
        return self._few(x, packed, out, norm, behind)

    def _narrow(self, x: Tensor, packed: Tensor) -> bool:
        """Whether Triton serves it: few rows, whose weights lie at multiples of 16 bytes."""
        rows, ins = x.shape
        return self.tiles is not None and 0 < rows <= self.few and ins <= INPUTS and ins % 8 == 0

    def _few(self, x: Tensor, weight: Tensor, out: Tensor, norm: Any, behind: Behind) -> Tensor:
        assert self.tiles is not None
        x, (rows, ins), outs = x.contiguous(), x.shape, out.shape[1]
        gates = 2 if behind.activation else 1
        if rows == 1:
            lines = max(1, BURST // (power(ins) * weight.element_size() * gates))
            warps = 8 if ins > 2048 else 4
            return self.tiles.row(x, weight, out, Shape(1, lines, ins, warps, 1), norm, behind)
        shape = Shape(max(16, power(rows)), 128, 64, 4, self.stages)
        segments = max(1, min(cdiv(self.cores * 9 // 10, cdiv(outs * gates, shape.outs)), ins // SMALL))
        return self.tiles.product(x, weight, out, shape, segments, behind)


def _mixes(dtype: torch.dtype) -> bool:
    """Whether torch multiplies these to float32 on the device that tensors are made on."""
    try:
        x = torch.zeros(16, 16, dtype=dtype)
        torch.mm(x, x, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


PLUGIN = Vendor
