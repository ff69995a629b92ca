"""FlashAttention-3 for rows of several tokens, on Hopper; rows of one token go through the radix tree.

Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision". The library is
optional: the wheel `tokenspeed-fa3` brings `flash_attn_interface`. It reads pages of any size. It does not know
what a step is for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from trine.kernels.installed import missing
from trine.registry import get

from .base import Limits, Store, Want
from .mixed import Mixed, Rows


class Flash(Mixed):
    """The library plans by itself, on the device."""

    name = "flash"
    order = 10

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.device != "cuda":
            return f"is for NVIDIA GPUs, not for {want.device}"
        if (capability := getattr(want, "capability", (0, 0))) != (9, 0):
            return f"needs compute capability 9.0, this is {'.'.join(map(str, capability))}"
        if want.invariant:
            return "its results depend on what shares the step"
        if want.sinks:
            return "knows no sinks"
        if want.softcap:
            return "is built without softcap"
        if want.dtype not in ("bfloat16", "float16") or want.kv_dtype != want.dtype:
            return f"is for 16 bits, KV alike, not {want.dtype} (KV {want.kv_dtype})"
        if want.head_dim % 8 or want.head_dim > 256:
            return f"is for heads of up to 256 numbers, by eights, not {want.head_dim}"
        if reason := missing("flash_attn_interface", "pip install tokenspeed-fa3"):
            return reason
        return get("kernels.attention", "triton").cannot(want)

    def __init__(
        self, want: Want, store: Store, platform: Any, group: int = 0, limits: Limits | None = None
    ) -> None:
        super().__init__(want, store, platform, group, limits)
        self.call = import_module("flash_attn_interface").flash_attn_with_kvcache
        self.window = (want.window - 1, 0) if want.window else (-1, -1)

    def prepare(self, rows: Rows) -> Rows:
        return rows

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
        return self.call(
            q,
            keys,
            values,
            cache_seqlens=rows.lengths,
            page_table=rows.pages,
            cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.count,
            softmax_scale=self.scale,
            causal=True,
            window_size=self.window,
        )


PLUGIN = Flash
