"""The table's operations in plain torch; on a CPU they are slices of memory, as fast as a copy is.

Only a CPU can be served: counts of runs are read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import KNOWN, RUN, Singles, State


class Reference:
    """Plain torch."""

    name = "reference"
    order = 100

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        return None if want.device == "cpu" else f"is for a CPU, not {want.device}"

    def __init__(self, want: Any = None) -> None: ...

    def apply(self, state: State, words: Tensor, runs: int) -> None:
        arena, source, known = state.arena.numpy(), words.numpy(), state.records.numpy()[:, KNOWN]
        for target, start, count, slot in source[len(source) - runs * RUN :].reshape(-1, RUN).tolist():
            if slot >= 0:
                target += int(known[slot])
                known[slot] += count
            arena[target : target + count] = source[start : start + count]

    def singles(self, state: State, slots: Tensor) -> Singles:
        real = slots > 0
        positions = torch.where(real, state.computed[slots], 0).long()
        ids = torch.where(real, state.tokens[slots, positions], 0).long()
        place, offset = positions // state.page_size, positions % state.page_size
        write = [
            torch.where(real, pages[slots, place].long() * state.page_size + offset, 0)
            for pages in state.pages
        ]
        lengths = positions + real
        state.computed[slots] = torch.where(real, lengths.int(), state.computed[slots])
        return Singles(ids, positions, write, lengths)

    def ragged(self, state: State, slots: Tensor, starts: Tensor, owner: Tensor) -> Singles:
        before = state.computed[slots].long()
        owners = slots[owner]
        positions = torch.arange(len(owner), device=owner.device) + (before - starts[:-1])[owner]
        place, offset = positions // state.page_size, positions % state.page_size
        write = [pages[owners, place].long() * state.page_size + offset for pages in state.pages]
        lengths = before + starts.diff()
        state.computed[slots] = lengths.int()
        return Singles(state.tokens[owners, positions].long(), positions, write, lengths)

    def append(self, state: State, slots: Tensor, tokens: Tensor) -> None:
        if (slots == 0).any():
            slots, tokens = slots[slots > 0], tokens[slots > 0]
        at = state.known[slots].long()
        state.tokens[slots, at] = tokens.int()
        state.known[slots] = (at + 1).int()


PLUGIN = Reference
