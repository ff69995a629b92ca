"""Attention of a native step on a CPU: what several rows share is read once, their queries side by side.

It is recorded, not done (see trine/kernels/native). Keys of a page lie by head and dimension, so that scores of
neighbouring positions are computed side by side; the store's own shape only says how much room there is.
"""

from __future__ import annotations

from typing import Any

from trine.core.types import Share
from trine.kernels.native import library
from trine.kernels.native.blocks import not_blocks

from .base import Limits, Step, Store, Want

PAGE = 16  # positions whose scores are computed side by side


class Native:
    """One KV group's."""

    name = "native"
    order = 60
    may_share = True
    shares_now = False

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if reason := not_blocks(want.weights) or library.cannot(want.device):
            return reason
        if want.page_size % PAGE:
            return f"is for pages of multiples of {PAGE} tokens, not {want.page_size}"
        if want.head_dim % 8 or want.heads * want.head_dim % 32:
            return (
                f"is for heads of multiples of 8 numbers, of 32 together, not {want.heads} of {want.head_dim}"
            )
        if want.heads // want.kv_heads > 64:
            return "is for at most 64 query heads for each KV head"
        if want.kv_dtype not in ("float32", "bfloat16"):
            return f"keeps KV in float32 or bfloat16, not {want.kv_dtype}"
        if want.softcap or want.sinks:
            return "knows no softcap and no sinks"
        return None

    def __init__(
        self, want: Want, store: Store, platform: Any, group: int = 0, limits: Limits | None = None
    ) -> None:
        self.want, self.store, self.group = want, store, group
        self.slots = limits.slots if limits else 257
        self.program: Any = None  # whoever records sets it
        scale = want.head_dim**-0.5 if want.scale is None else want.scale
        self.shape = library.Group(
            want.heads, want.kv_heads, want.head_dim, want.page_size, want.window, scale
        )

    def share(self, shares: list[Share]) -> None:
        self.program.share(self.group, shares, self.slots)

    def plan(self, step: Step) -> None:
        return None

    def run(self, q: Any, layer: int, step: Step) -> Any:
        keys, values = self.store.layer(layer)
        return q.tape.attend(q, self.group, keys, values)


PLUGIN = Native
