"""How products in Triton are launched: tiles, segments, and the scratch memory that split ones share.

It does not know which product is asked for when; that is the business of `vendor` and `fixed`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Behind, Want
from .choice import OVERLAP, Burst, Shape, cdiv, power

CORES = 132  # multiprocessors, where a device does not say: H100, H200
SPLITS = 2 * CORES  # tiles that fit in the scratch memory,
TILE = 256 * 128  # of so many elements


class Tiles:
    """Launches. One for each product object: all its calls must be ordered one after the other."""

    def __init__(self, want: Want) -> None:
        from trine.kernels.jit import gemm, gemv, quick

        self.gemm: Any = quick(gemm)
        self.gemv: Any = quick(gemv)
        modern = want.device == "cuda" and want.capability >= (9, 0)
        self.pdl = overlapping(modern and OVERLAP > 0)
        self.part = torch.empty(SPLITS * TILE, dtype=torch.float32)
        self.count = torch.zeros(SPLITS, dtype=torch.int32)  # always, but while a product runs

    def product(
        self, x: Tensor, weight: Tensor, out: Tensor, shape: Shape, segments: int, behind: Behind
    ) -> Tensor:
        """out = x W^T. Split when all programs fit in the scratch memory: the bits are the same."""
        (rows, ins), outs = x.shape, out.shape[1]
        tiles = cdiv(outs, shape.outs // (2 if behind.activation else 1))
        programs = tiles * cdiv(rows, shape.rows)
        length = cdiv(ins, segments * shape.ins) * shape.ins
        split = segments > 1 and programs * segments * shape.rows * shape.outs <= SPLITS * TILE
        split = split and programs <= SPLITS
        residual = behind.residual
        self.gemm.product[(programs * (segments if split else 1),)](
            x, weight, out, out if residual is None else residual, self.part, self.count, rows, outs, ins,
            segments, length, shape.rows, shape.outs, shape.ins, length * segments == ins, split, 8,
            residual is not None, behind.activation,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        return out

    def row(
        self, x: Tensor, weight: Tensor, out: Tensor, burst: Burst, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor:  # fmt: skip
        """The same for one row, whose norm may be part of it too."""
        ins, outs = x.shape[1], out.shape[1]
        gain, eps = norm if norm else (x, 0.0)
        residual = behind.residual
        self.gemv.gemv[(cdiv(outs, burst.outs),)](
            x, weight, out, gain, out if residual is None else residual, eps, outs, ins, burst.outs,
            power(ins), power(ins) == ins, norm is not None, residual is not None, behind.activation,
            burst.ahead if self.pdl["PDL"] else 0, num_warps=burst.warps, **self.pdl,
        )  # fmt: skip
        return out


def overlapping(whether: bool) -> dict[str, Any]:
    """What a launch is told of the kernel before it."""
    return {"PDL": True, "launch_pdl": True} if whether else {"PDL": False}
