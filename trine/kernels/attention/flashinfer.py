"""FlashInfer for rows of several tokens; rows of one token go through the radix tree.

Ye et al. 2025, "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving". The library is
optional and compiles its kernels when they are first used. It plans on the host, from lengths that it reads
from the device: a step with such rows waits for the device once. It does not know what a step is for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trine.kernels.installed import missing
from trine.registry import get

from .base import Limits, Store, Want
from .mixed import Mixed, Rows

WORKSPACE = 128 * 2**20  # bytes, for parts of results: what the library's documentation asks for


class FlashInfer(Mixed):
    """One wrapper for all steps: they are planned and run one after the other."""

    name = "flashinfer"
    order = 30

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.device != "cuda":
            return f"is for NVIDIA GPUs, not for {want.device}"
        if (capability := getattr(want, "capability", (0, 0))) < (8, 0):
            return f"needs compute capability 8.0, this is {'.'.join(map(str, capability))}"
        if want.invariant:
            return "its results depend on what shares the step"
        if want.sinks:
            return "knows no sinks"
        if want.dtype not in ("bfloat16", "float16") or want.kv_dtype != want.dtype:
            return f"is for 16 bits, KV alike, not {want.dtype} (KV {want.kv_dtype})"
        if want.head_dim not in (64, 128, 256):
            return f"is for heads of 64, 128 or 256 numbers, not {want.head_dim}"
        if reason := missing("flashinfer", "pip install 'flashinfer-python>=0.6.14,<0.7'"):
            return reason
        return get("kernels.attention", "triton").cannot(want)

    def __init__(
        self, want: Want, store: Store, platform: Any, group: int = 0, limits: Limits | None = None
    ) -> None:
        super().__init__(want, store, platform, group, limits)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=store.layer(0)[0].device)
        self.wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def prepare(self, rows: Rows) -> Any:
        """Pages one row behind the other, and how far the last of each is filled."""
        want, size = self.want, self.want.page_size
        counts = (rows.lengths + size - 1) // size
        bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        index = torch.arange(rows.pages.shape[1], device=rows.pages.device)
        dtype = getattr(torch, want.dtype)
        self.wrapper.plan(
            rows.starts,
            bounds,
            rows.pages[index < counts[:, None]],
            (rows.lengths - 1) % size + 1,
            want.heads,
            want.kv_heads,
            want.head_dim,
            size,
            causal=True,
            sm_scale=self.scale,
            window_left=want.window - 1 if want.window else -1,
            logits_soft_cap=want.softcap or None,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return self.wrapper

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Any) -> Tensor:
        return rows.run(q, (keys, values))


PLUGIN = FlashInfer
