"""The small operations in Triton, for NVIDIA and AMD GPUs: one launch each, arithmetic in float32.

Shapes of launches depend on the sizes of a row alone, or touch no sum: a row's bits are its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.kernels.installed import missing

from .base import HeadNorm, Heads, Places, Want

LARGEST = 16384  # elements of a normed row: what one program holds in registers
HEADS = 16  # of a token, in a program of `place`
OVERLAP = 1  # tokens up to which a launch starts before the kernel in front of it is done (PDL),
LATE = (
    512  # and up to which it only starts where that one leaves room: the vendor's products gain nothing from
)
# neighbours that take theirs
FEW = 64  # tokens up to which gated rows are cut small, so that all multiprocessors get some
ACTIVATIONS = ("silu", "gelu_tanh")


class Turn(NamedTuple):
    """Of a step's tokens: `place` looks the angles up itself."""

    table: Tensor  # [positions there are, 2 * dim]
    positions: Tensor  # [tokens]


class Triton:
    """Triton kernels."""

    name = "triton"
    order = 20

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.device not in ("cuda", "rocm"):
            return f"is for GPUs, not {want.device}"
        return missing("triton")

    def __init__(self, want: Want | None = None) -> None:
        from trine.kernels.jit import fused, quick

        self.jit: Any = quick(fused)
        pdl = want is not None and want.device == "cuda" and want.capability >= (9, 0)
        self.early, self.late = (OVERLAP, LATE) if pdl else (0, 0)

    def _options(self, tokens: int) -> dict[str, Any]:
        """Of a launch."""
        if tokens <= max(self.early, self.late):
            return {"PDL": 1 if tokens <= self.early else 2, "launch_pdl": True}
        return {"PDL": 0}

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._norm(x, None, weight, eps, out)
        return out

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.norm(x, weight, eps), x
        self._norm(x, residual, weight, eps, x)
        return x, residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        size = x.shape[-1]
        rows = x.numel() // max(size, 1)
        assert size <= LARGEST and x.is_contiguous(), (x.shape, x.stride())
        if not rows:
            return
        block = power(size)
        self.jit.norm[(rows,)](
            x, residual if residual is not None else x, weight, out, eps, size, weight.numel() // size,
            residual is not None, block, num_warps=min(16, max(1, block // 512)),
            **self._options(rows),
        )  # fmt: skip

    def turn(self, table: Tensor, positions: Tensor) -> Turn:
        return Turn(table, positions)

    def place(self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, turn: Turn, places: Places) -> Tensor:
        tokens = qkv.shape[0]  # len() of a tensor takes as long as a launch
        q = qkv.new_empty(tokens, heads.queries, heads.dim)
        keys, values = places.keys, places.values
        for store in (keys, values):  # a position is found by one stride
            assert store.stride(0) == store.shape[1] * store.stride(1) and store.stride(2) == heads.dim
        assert qkv.is_contiguous() and turn.table.shape[1] == 2 * heads.dim
        if not tokens:
            return q
        count = min(HEADS, power(heads.queries + 2 * heads.keys))
        chunks = -(-(heads.queries + 2 * heads.keys) // count)
        weight, eps = norm if norm else (turn.table, 0.0)
        self.jit.place[(tokens * chunks,)](
            qkv, turn.table, turn.positions, weight, places.write, q, keys, values, eps,
            keys.stride(1), values.stride(1), heads.queries, heads.keys, heads.dim, norm is not None,
            chunks, count, power(heads.dim // 2), num_warps=4,
            **self._options(tokens),
        )  # fmt: skip
        return q

    def gated(self, x: Tensor, activation: str) -> Tensor:
        assert activation in ACTIVATIONS and x.is_contiguous(), activation
        tokens, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(tokens, size)
        if not tokens:
            return out
        block, warps = (512, 2) if tokens <= FEW else (2048, 4)
        chunks = -(-size // block)
        self.jit.gated[(tokens * chunks,)](
            x, out, size, activation, chunks, block, num_warps=warps, **self._options(tokens)
        )
        return out


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


PLUGIN = Triton
