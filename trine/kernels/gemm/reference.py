"""Float products on a CPU: weights in float32, bfloat16 or float16, arithmetic in float32.

Matrix libraries choose a kernel by the number of rows, and kernels sum in different orders. Where a row's
result must not depend on its neighbours, rows are therefore multiplied in tiles of a fixed number: the
library only ever sees one shape. The price is a step of few rows, and some speed of many (measured: about
1.7 times the time of one product of 256 rows).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import FLOATS, Scratch, Want, beside, not_cpu

TILE = 8  # rows


class Reference:
    """y = x W^T in float32."""

    name = "reference"
    order = 100

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights not in FLOATS:
            return f"is for float weights, not {want.weights}"
        return not_cpu(want)

    def __init__(self, want: Want) -> None:
        self.tiled = want.invariant
        self.scratch = Scratch()

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def multiply(self, x: Tensor, packed: Tensor, wide: bool = False) -> Tensor:
        if not self.tiled:
            return beside([F.linear(x, part) for part in self.scratch.parts(packed)])
        rows = x.shape[0]
        if lacking := -rows % TILE:
            x = F.pad(x, (0, 0, 0, lacking))
        tiles = x.split(TILE)
        columns = [[F.linear(tile, part) for tile in tiles] for part in self.scratch.parts(packed)]
        return beside([torch.cat(column)[:rows] for column in columns])


PLUGIN = Reference
