"""Products by weights in blocks, in a native step: they are recorded, not done (see trine/kernels/native).

Rows are multiplied in 8 bits with a scale for each 32 inputs: sums of a block are exact, and blocks follow one
another, so no bit of a row depends on the rows beside it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trine.kernels.native import library
from trine.kernels.native.blocks import Packed, not_blocks

from .base import Want


class Native:
    """Weights are packed once (native.blocks)."""

    name = "native"
    order = 10

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        return not_blocks(want.weights) or library.cannot(want.device)

    def __init__(self, want: Want) -> None: ...

    def pack(self, weight: Packed) -> Packed:
        return weight

    def unpack(self, packed: Packed) -> Tensor:
        return packed.float()

    def multiply(self, x: Any, packed: Packed, wide: bool = False) -> Any:
        return x.tape.linear(x, packed, wide)


PLUGIN = Native
