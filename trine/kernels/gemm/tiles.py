"""How products in Triton are launched: tiles, segments, and the scratch memory that split ones share.

It does not know which product is asked for when; that is the business of `vendor` and `fixed`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Behind, Want

CORES = 132  # multiprocessors, where a device does not say: H100, H200
SPLITS = 2 * CORES  # programs that may share scratch memory
TILE = 128 * 128  # elements of the largest tile


class Shape(NamedTuple):
    """Of a tile, and how a program works on it."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int  # of inputs on their way at a time


class Tiles:
    """Launches. One for each product object: all its calls must be ordered one after the other."""

    def __init__(self, want: Want) -> None:
        from trine.kernels.jit import gemm, gemv

        self.gemm: Any = gemm
        self.gemv: Any = gemv
        pdl = want.device == "cuda" and want.capability >= (9, 0)
        self.pdl: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
        self.part = torch.empty(SPLITS * TILE, dtype=torch.float32)
        self.count = torch.zeros(SPLITS, dtype=torch.int32)

    def product(
        self, x: Tensor, weight: Tensor, out: Tensor, shape: Shape, segments: int, behind: Behind, ahead: int = 0
    ) -> Tensor:  # fmt: skip
        """out = x W^T. Split when all programs fit in the scratch memory: the bits are the same."""
        (rows, ins), outs = x.shape, out.shape[1]
        tiles = cdiv(outs, shape.outs // (2 if behind.activation else 1))
        programs = tiles * cdiv(rows, shape.rows)
        length = cdiv(ins, segments * shape.ins) * shape.ins
        split = segments > 1 and programs * segments <= SPLITS
        residual = behind.residual
        self.gemm.product[(programs * (segments if split else 1),)](
            x, weight, out, out if residual is None else residual, self.part, self.count, rows, outs, ins,
            segments, length, shape.rows, shape.outs, shape.ins, length * segments == ins, split, 8,
            residual is not None, behind.activation, ahead if self.pdl["PDL"] else 0,
            num_warps=shape.warps, num_stages=shape.stages, **self.pdl,
        )  # fmt: skip
        return out

    def row(
        self, x: Tensor, weight: Tensor, out: Tensor, shape: Shape, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor:  # fmt: skip
        """The same for one row, whose norm may be part of it too. Of the shape only outs and warps count."""
        ins, outs = x.shape[1], out.shape[1]
        gain, eps = norm if norm else (x, 0.0)
        residual = behind.residual
        self.gemv.gemv[(cdiv(outs, shape.outs),)](
            x, weight, out, gain, out if residual is None else residual, eps, outs, ins, shape.outs,
            power(ins), power(ins) == ins, norm is not None, residual is not None, behind.activation,
            num_warps=shape.warps,
            **self.pdl,
        )  # fmt: skip
        return out


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
