"""Backends of two: which rows go to the library, and what it is told. The library is a stand-in in plain torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from msgspec.structs import asdict

from tests.kit.attention import SLOTS, World, want
from trine.kernels.attention.base import Limits
from trine.kernels.attention.flash import Flash
from trine.kernels.attention.flashinfer import FlashInfer
from trine.platforms.cpu import Cpu


def attend(
    q: Any, keys: Any, values: Any, pages: Any, length: int, window: int, scale: float
) -> torch.Tensor:
    """One row [tokens, heads, dim]: reads every page it is given, as libraries may, so NaN would spread."""
    k, v = keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]
    share = q.shape[1] // k.shape[1]
    score = torch.einsum("qhd,thd->hqt", q, k.repeat_interleave(share, 1)) * scale
    apart = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
    hidden = (apart < 0) | (apart >= window)
    weight = score.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weight, v.repeat_interleave(share, 1))


def flash(
    q,
    k,
    v,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
):
    assert causal and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    window = window_size[0] + 1 or 2**20
    return torch.cat(
        [
            attend(
                q[cu_seqlens_q[r] : cu_seqlens_q[r + 1]],
                k,
                v,
                page_table[r],
                int(length),
                window,
                softmax_scale,
            )
            for r, length in enumerate(cache_seqlens)
        ]
    )


class Wrapper:
    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self, starts: Any, bounds: Any, pages: Any, last: Any, *_: Any, sm_scale: float, **more: Any
    ) -> None:
        self.given = starts, bounds, pages, last, sm_scale, more

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        starts, bounds, pages, last, scale, more = self.given
        window, size = more["window_left"] + 1 or 2**20, kv[0].shape[1]
        out = []
        for r in range(len(last)):
            mine = pages[bounds[r] : bounds[r + 1]]
            length = (len(mine) - 1) * size + int(last[r])
            out.append(attend(q[starts[r] : starts[r + 1]], *kv, mine, length, window, scale))
        return torch.cat(out)


@pytest.mark.parametrize("short", [42, 43])  # the longest row has 43 positions
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("kind", [Flash, FlashInfer])
def test_rows_of_several_tokens_go_to_the_library_unless_they_are_short(
    kind: Any, window: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "short", short)
    calls: list[int] = []
    attend = kind.attend
    monkeypatch.setattr(kind, "attend", lambda *a: (calls.append(len(a[1])), attend(*a))[1])
    other: Any = SimpleNamespace(flash_attn_with_kvcache=flash)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", other)
    stand_in: Any = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    world = World(want(window=window))
    world.common([1, 2], 0, 4)
    for slot, length in ((1, 18), (2, 43), (3, 17), (4, 21), (5, 2)):
        world.fill(slot, length)
    if window:
        world.pages[2, :2] = 2**20  # behind the window
    backend = kind(world.want, world, Cpu(), 0, Limits(16, SLOTS, 128, 64))
    backend.share(world.shares)
    for rows in ([(1, 1), (3, 1), (2, 20), (4, 21), (5, 2)], [(2, 20), (5, 2)], [(1, 1), (2, 1)]):
        step = world.step(rows)
        q = torch.randn(step.bound.tokens, 4, 16)
        found = backend.run(q, 0, step._replace(attention=[backend.plan(step)]))
        assert torch.allclose(found.double(), world.expected(q, step), atol=1e-5)
    assert calls == ([43, 22] if short < 43 else [])


@pytest.mark.parametrize("kind", [Flash, FlashInfer])
def test_cannot_says_why(kind: Any) -> None:
    wish = asdict(want(dtype="bfloat16", kv_dtype="bfloat16", device="cuda", head_dim=64)) | {
        "capability": (9, 0)
    }
    for change, reason in (
        ({"device": "rocm"}, "NVIDIA"),
        ({}, "installed"),
        ({"capability": (7, 5)}, "capability"),
        ({"invariant": True}, "step"),
        ({"kv_dtype": "float8_e4m3fn"}, "KV"),
        ({"sinks": True}, "sinks"),
        ({"softcap": 30.0}, "softcap" if kind is Flash else "installed"),
    ):
        assert reason in str(kind.cannot(SimpleNamespace(**(wish | change))))
