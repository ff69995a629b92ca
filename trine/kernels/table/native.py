"""The table's operations by one call each of the native library, over the table's own memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trine.kernels.native import library

from .base import Singles, State

DEEP = 4  # results for the same numbers of tokens and rows that hold at a time
FEW = 256  # tokens: results of more are made anew each time, which costs less than the step then
MOST = 64  # numbers of tokens and rows that are remembered


class Known(NamedTuple):
    """A table, as the library reads it."""

    state: State
    at: int  # where its addresses and sizes lie
    kept: np.ndarray[Any, Any]
    rings: dict[tuple[int, int], list[tuple[Singles, int]]]  # by tokens and rows: results, where they lie


class Native:
    """C++ behind ctypes."""

    name = "native"
    order = 10

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        return library.cannot(want.device)

    def __init__(self, want: Any = None) -> None:
        loaded = library.load()
        self._apply, self._singles = loaded.trine_table_apply, loaded.trine_table_singles
        self._ragged, self._append = loaded.trine_table_ragged, loaded.trine_table_append
        self.known: Known | None = None
        self.turn = 0

    def apply(self, state: State, words: Tensor, runs: int) -> None:
        bad = self._apply(self._at(state), words.data_ptr(), len(words), runs)
        assert not bad, f"run {bad - 1} of an order leads out of the table"

    def singles(self, state: State, slots: Tensor) -> Singles:
        known, rows = self._known(state), len(slots)
        found, out = self._turn(known, rows, rows)
        bad = self._singles(known.at, slots.data_ptr(), rows, out)
        assert not bad, f"row {bad - 1} of {slots.tolist()} has no place in the table"
        return found

    def ragged(self, state: State, slots: Tensor, starts: Tensor, owner: Tensor) -> Singles:
        known, rows, total = self._known(state), len(slots), len(owner)
        if total > FEW:
            found, out = _results(total, len(state.pages), rows)
        else:
            found, out = self._turn(known, total, rows)
        bad = self._ragged(known.at, slots.data_ptr(), rows, starts.data_ptr(), total, out)
        assert not bad, f"row {bad - 1} of {slots.tolist()} has no place in the table"
        return found

    def append(self, state: State, slots: Tensor, tokens: Tensor) -> None:
        apart = tokens.stride(0) * tokens.element_size()
        bad = self._append(self._at(state), slots.data_ptr(), tokens.data_ptr(), apart, len(slots))
        assert not bad, f"slot {slots[bad - 1]} is full, or is none"

    def _turn(self, known: Known, tokens: int, rows: int) -> tuple[Singles, int]:
        """The results whose turn it is."""
        ring = known.rings.get((tokens, rows))
        if ring is None:
            if len(known.rings) >= MOST:
                known.rings.clear()
            groups = len(known.state.pages)
            ring = known.rings[tokens, rows] = [_results(tokens, groups, rows) for _ in range(DEEP)]
        self.turn = (self.turn + 1) % DEEP
        return ring[self.turn]

    def _at(self, state: State) -> int:
        return self._known(state).at

    def _known(self, state: State) -> Known:
        known = self.known
        if known is None or known.state is not state:
            known = self.known = _look(state)
        return known


PLUGIN = Native


def _look(state: State) -> Known:
    groups, slots, width = state.pages.shape
    parts = state.arena, state.records, state.tokens, state.pages
    sizes = len(state.arena), slots, state.tokens.shape[1], groups, width, state.page_size
    head = np.array([*(part.data_ptr() for part in parts), *sizes], np.int64)  # struct Places
    return Known(state, head.ctypes.data, head, {})


def _results(tokens: int, groups: int, rows: int) -> tuple[Singles, int]:
    """What one call writes, and where: lengths [rows], then ids, positions and places of groups, [tokens] each."""
    out = torch.empty(rows + (2 + groups) * tokens, dtype=torch.int64)
    lengths, ids, positions, *write = out.split_with_sizes([rows] + [tokens] * (2 + groups))
    return Singles(ids, positions, write, lengths), out.data_ptr()
