"""The table's operations in Triton, for NVIDIA and AMD GPUs. Nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.kernels.installed import missing

from .base import PIECE, RECORD, RUN, Singles, State

FEW = 64  # rows, or tokens, of a program: memory that each reads is scattered


class Triton:
    """Triton kernels."""

    name = "triton"
    order = 20

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        if want.device not in ("cuda", "rocm"):
            return f"is for GPUs, not {want.device}"
        return missing("triton")

    def __init__(self, want: Any = None) -> None:
        from trine.kernels.jit import quick, table

        self.jit: Any = quick(table)
        pdl = want is not None and want.device == "cuda" and want.capability >= (9, 0)
        self.pdl = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}

    def apply(self, state: State, words: Tensor, runs: int) -> None:
        at = len(words) - runs * RUN
        self.jit.apply[(runs,)](state.arena, state.records, words, at, RECORD, PIECE, num_warps=4)

    def singles(self, state: State, slots: Tensor) -> Singles:
        rows, groups = len(slots), len(state.pages)
        out = torch.empty(3 + groups, rows, dtype=slots.dtype, device=slots.device)
        ids, positions, lengths, *write = out.unbind()
        self.jit.singles[(-(-rows // FEW),)](
            state.tokens, state.pages, state.records, slots, ids, positions, out[3:], lengths, rows, *_sizes(state),
            RECORD, groups, state.page_size, FEW, num_warps=2, **self.pdl,
        )  # fmt: skip
        return Singles(ids, positions, write, lengths)

    def ragged(self, state: State, slots: Tensor, starts: Tensor, owner: Tensor) -> Singles:
        rows, total, groups = len(slots), len(owner), len(state.pages)
        lengths, begins = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.int32)
        self.jit.reach[(-(-rows // FEW),)](
            state.records, slots, starts, lengths, begins, rows, RECORD, FEW, num_warps=2, **self.pdl
        )
        out = torch.empty(2 + groups, total, dtype=slots.dtype, device=slots.device)
        ids, positions, *write = out.unbind()
        self.jit.ragged[(-(-total // FEW),)](
            state.tokens, state.pages, slots, owner, begins, ids, positions, out[2:], total, *_sizes(state),
            groups, state.page_size, FEW, num_warps=2, **self.pdl,
        )  # fmt: skip
        return Singles(ids, positions, write, lengths)

    def append(self, state: State, slots: Tensor, tokens: Tensor) -> None:
        rows = len(slots)
        self.jit.append[(-(-rows // FEW),)](
            state.tokens, state.records, slots, tokens, rows, state.tokens.shape[1], RECORD, FEW,
            num_warps=2, **self.pdl,
        )  # fmt: skip


def _sizes(state: State) -> tuple[int, int, int]:
    return state.tokens.shape[1], state.tokens.shape[0], state.pages.shape[2]


PLUGIN = Triton
