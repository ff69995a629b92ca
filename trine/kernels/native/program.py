"""A recorded model, called as the model itself is: a step in, logits out, in one native call."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from trine.core.types import Share
from trine.kernels.attention.base import Step

from . import library
from .library import RUN, Buffer, Group, Op
from .tape import Tape


class Program:
    """`logits`: of so many tokens at most, in so large a vocabulary. It keeps what the tape points to alive."""

    def __init__(self, tape: Tape, threads: int, kv_bits: int, logits: tuple[int, int]) -> None:
        self.lib, self.tape = library.load(), tape
        self.groups = (Group * len(tape.groups))(*tape.groups)
        self.ops = (Op * len(tape.ops))(*tape.ops)
        buffers = (Buffer * len(tape.buffers))(*tape.buffers)
        self.pool = self.lib.trine_pool(threads)
        self.handle = self.lib.trine_program(
            self.pool, self.ops, len(self.ops), buffers, len(buffers), self.groups, len(self.groups), kv_bits
        )
        self.logits = torch.empty(logits)
        self.step = library.Step()
        self.write, self.pages = ((ctypes.c_void_p * len(self.groups))() for _ in "wp")
        self.widths = (ctypes.c_int64 * len(self.groups))()
        self.step.write, self.step.pages = ctypes.addressof(self.write), ctypes.addressof(self.pages)
        self.step.widths, self.step.logits = ctypes.addressof(self.widths), self.logits.data_ptr()
        self.reference = ctypes.byref(self.step)

    def __call__(self, step: Step) -> Tensor:
        """Logits [wanted, vocab], until the next call. Indices are of 64 bits, pages of 32."""
        given = self.step
        wanted = step.ids if step.wanted is None else step.wanted
        given.tokens, given.rows, given.wanted = step.ids.shape[0], step.slots.shape[0], wanted.shape[0]
        given.ids, given.positions = step.ids.data_ptr(), step.positions.data_ptr()
        given.starts, given.lengths = step.starts.data_ptr(), step.lengths.data_ptr()
        given.slots, given.picked = step.slots.data_ptr(), None if step.wanted is None else wanted.data_ptr()
        for i, (write, pages) in enumerate(zip(step.write, step.pages, strict=True)):
            self.write[i], self.pages[i], self.widths[i] = write.data_ptr(), pages.data_ptr(), pages.stride(0)
        self.lib.trine_step(self.handle, self.reference)
        return self.logits[: given.wanted]

    def share(self, group: int, shares: list[Share], slots: int) -> None:
        """From now on these slots have runs of pages in common."""
        runs = whole_runs(shares, slots, self.groups[group].page)
        first, end = (np.array([run[i] for run in runs], np.int64) for i in (0, 1))
        members = np.array([slot for run in runs for slot in run[2]], np.int32)
        ends = np.cumsum([len(run[2]) for run in runs], dtype=np.int32)
        self.lib.trine_share(
            self.handle,
            group,
            len(runs),
            first.ctypes.data,
            end.ctypes.data,
            ends.ctypes.data,
            members.ctypes.data,
            slots,
        )

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self.lib.trine_program_end(handle)
            self.lib.trine_pool_end(self.pool)


def whole_runs(shares: list[Share], slots: int, page: int) -> list[tuple[int, int, list[int]]]:
    """Positions that begin and end at multiples of RUN, and their slots: what is left of the shares.

    A slot's runs follow one another from position 0. What a run has beyond the last multiple goes to the next one
    of the same slots, or is their own."""
    reach: dict[int, int] = {}  # by slot: pages that its shares cover
    taken: dict[int, int] = {}  # positions of its runs
    found = []
    for share in sorted(shares, key=lambda share: share.first):
        fit = [s for s in dict.fromkeys(share.slots) if 0 < s < slots and reach.get(s, 0) == share.first]
        if len(fit) < 2 or share.count <= 0:
            continue
        for slot in fit:
            reach[slot] = share.first + share.count
        first, end = taken.get(fit[0], 0), (share.first + share.count) * page // RUN * RUN
        fit = [slot for slot in fit if taken.get(slot, 0) == first]
        if end > first and len(fit) > 1:
            found.append((first, end, fit))
            taken |= dict.fromkeys(fit, end)
    return found
