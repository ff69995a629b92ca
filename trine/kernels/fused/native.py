"""The small operations of a native step: they are recorded, not done (see trine/kernels/native/tape.py).

Only products by weights in blocks are recorded, so this goes with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from trine.kernels.native import library
from trine.kernels.native.blocks import not_blocks

from .base import HeadNorm, Heads, Places, Want

KINDS = {"silu": 0, "gelu_tanh": 1}


class Turn(NamedTuple):
    table: Tensor  # [positions there are, 2 * dim]


class Native:
    """Operations of a tape. x, residual, qkv and what comes back are its symbols."""

    name = "native"
    order = 30

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        return not_blocks(want.weights) or library.cannot(want.device)

    def __init__(self, want: Want | None = None) -> None: ...

    def norm(self, x: Any, weight: Tensor, eps: float) -> Any:
        return x.tape.norm(None, x, weight, eps)

    def add_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> tuple[Any, Any]:
        return x.tape.norm(x, residual, weight, eps), residual

    def turn(self, table: Tensor, positions: Any) -> Turn:
        return Turn(table)

    def place(self, qkv: Any, heads: Heads, norm: HeadNorm | None, turn: Turn, places: Places) -> Any:
        write: Any = places.write
        weight, eps = norm if norm else (None, 0.0)
        return qkv.tape.place(qkv, write.group, places.keys, places.values, turn.table, weight, eps)

    def gated(self, x: Any, activation: str) -> Any:
        return x.tape.gated(x, KINDS[activation])


PLUGIN = Native
