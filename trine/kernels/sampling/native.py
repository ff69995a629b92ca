"""Choosing tokens by one call of the native library: what `reference` says, and nearly nothing in Python.

What rows ask for is packed once for a set of rows, and kept while the next step has the same. It reads the table
for what grows: how many tokens there are, and which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trine.kernels.native import library

from .base import REALS, WHOLES, Ask, Choice, Rows, Seen

DEEP = 4  # choices of the same rows that hold at a time

WISH = np.dtype(
    [(name, np.float64) for name in REALS]
    + [(name, np.int64) for name in (*WHOLES, "slot", "draws", "penalties")]
    + [(name, np.int64) for name in ("stops", "stop_count", "biased", "bias", "bias_count")]
)  # struct Wish of native/src/sampling.h; lists are addresses


class Plan(NamedTuple):
    """What a set of rows asks for, as the library reads it."""

    asks: list[Ask]
    slots: Tensor
    at: int  # where it lies
    kept: tuple[Any, ...]  # memory that it leads to
    ring: list[tuple[Choice, int]]  # choices, and where their numbers lie


class Native:
    """C++ behind ctypes."""

    name = "native"
    order = 10

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        return library.cannot(want.device)

    def __init__(self, want: Any = None) -> None:
        loaded = library.load()
        self._choose, self._see = loaded.trine_choose, loaded.trine_see
        self.plan: Plan | None = None
        self.turn = 0

    def choose(self, logits: Tensor, rows: Rows) -> Choice:
        plan = self.plan
        if plan is None or plan.asks is not rows.asks or plan.slots is not rows.slots:
            plan = self.plan = make_plan(rows)
        self.turn = (self.turn + 1) % DEEP
        choice, said = plan.ring[self.turn]
        logits = _straight(logits)
        allowed = _allowed(rows) if rows.allowed else None
        self._choose(
            plan.at,
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            None if allowed is None else allowed[0].ctypes.data,
            said,
        )
        return choice

    def logprobs(self, logits: Tensor, choice: Choice, which: list[int], most: int, rows: Rows) -> Seen:
        logits, said = _straight(logits), choice.said.contiguous()
        places = np.array(which, np.int64)
        chances = torch.empty(len(which), 1 + most, dtype=torch.float32)
        ids = torch.empty(len(which), 1 + most, dtype=torch.int32)
        self._see(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            places.ctypes.data,
            len(which),
            said.data_ptr(),
            most,
            chances.data_ptr(),
            ids.data_ptr(),
        )
        return Seen(chances, ids)


PLUGIN = Native


def make_plan(rows: Rows) -> Plan:
    """Pack what these rows ask for."""
    asks, state = rows.asks, rows.state
    wishes = np.zeros(len(asks), WISH)
    for i, (ask, slot) in enumerate(zip(asks, rows.slots.tolist(), strict=True)):
        biased, bias = ask.bias or (None, None)
        wishes[i] = (
            *ask.reals, *ask.wholes, slot, ask.draws, ask.penalties, _at(ask.stops), len(ask.stops),
            _at(biased), _at(bias), 0 if biased is None else len(biased),
        )  # fmt: skip
    places = state.records.data_ptr(), state.tokens.data_ptr(), len(asks), state.tokens.shape[1]
    head = np.array([_at(wishes), *places], np.int64)  # struct Choosing
    said = [torch.zeros(2, len(asks), dtype=torch.int32) for _ in range(DEEP)]
    ring = [(Choice(tensor), tensor.data_ptr()) for tensor in said]
    return Plan(asks, rows.slots, _at(head), (wishes, head, state), ring)


def _at(array: np.ndarray[Any, Any] | None) -> int:
    """The address of an array that somebody keeps."""
    return 0 if array is None else array.ctypes.data


def _allowed(rows: Rows) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """By row: address and length of the ids it may choose, -1 for all; and these ids."""
    table = np.full((len(rows.asks), 2), -1, np.int64)  # struct Allowed
    kept = []
    for row, ids in rows.allowed.items():
        kept.append(np.ascontiguousarray(ids, np.int64))
        table[row] = kept[-1].ctypes.data, len(ids)
    return table, kept


def _straight(logits: Tensor) -> Tensor:
    """float32 whose rows have no gaps."""
    if logits.dtype is torch.float32 and logits.stride(1) == 1:
        return logits
    return logits.float().contiguous()
