"""Packs a batch's orders: everything becomes runs of words for the table's arena.

The device applies all runs of a batch at once, in any order, so what comes later in the batch must win here:
a grant over a join's pages changes the words that the join brought, and only what lies beside them becomes a
run of its own. No loop here is over tokens. It does not know where the words are sent from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trine.core.types import Batch, Grant, Join, Write
from trine.kernels.sampling.base import Ask
from trine.kernels.table.base import AT_REALS, AT_WHOLES, COMPUTED, KNOWN, PIECE, PROMPT, RECORD, RUN, State

from .staging import Words


class Placed(NamedTuple):
    """Entries of a page table that this batch brought already."""

    first: int
    stop: int
    at: int  # where in the words


class Packer:
    """One batch, packed into `room`, which has `size(batch)` words."""

    def __init__(self, state: State, room: Words) -> None:
        self.state, self.room = state, room
        self.at = 0
        self.runs: list[int] = []
        self.placed: dict[tuple[int, int], list[Placed]] = {}  # by group and slot
        self.records: dict[int, int] = {}  # where in the words the record of a slot lies, that joins here
        self.tails: dict[int, list[int]] = {}  # what is written behind slots that do not

    @staticmethod
    def size(batch: Batch) -> int:
        """Words that are enough."""
        most = RUN
        for join in batch.joins:
            held = len(join.tokens) // 4 + sum(map(len, join.pages))
            most += held + RECORD + 2 + RUN * (held // PIECE + 2 + len(join.pages))
        for grant in batch.grants:  # a grant between others may fall to pieces
            most += (len(grant.pages) + 1) * (1 + RUN)
        for write in batch.writes:
            most += len(write.tokens) + RUN * (len(write.tokens) // PIECE + 1)
        return most

    def join(self, join: Join, ask: Ask) -> None:
        state, room, slot = self.state, self.room, join.slot
        assert slot not in self.records, f"slot {slot} was joined twice in one batch"
        ids = np.frombuffer(join.tokens, "<i4")
        self._put(state.tokens_at(slot), ids)
        for group, pages in enumerate(join.pages):
            if pages:
                self._place(group, slot, 0, pages)
        at = self.at = self.at + self.at % 2  # settings are words of 64 bits
        record = room[at : at + RECORD]
        record[KNOWN], record[COMPUTED], record[PROMPT], record[3] = len(ids), join.computed, join.prompt, 0
        record[AT_REALS:AT_WHOLES].view(np.float64)[:] = ask.reals
        record[AT_WHOLES:].view(np.int64)[:] = (*ask.wholes, 0)
        self.runs += (state.record_at(slot), at, RECORD, -1)
        self.at = at + RECORD
        self.records[slot] = at

    def grant(self, grant: Grant) -> None:
        self._place(grant.group, grant.slot, grant.first, grant.pages)

    def write(self, write: Write) -> None:
        at = self.records.get(write.slot)
        if at is None:
            self.tails.setdefault(write.slot, []).extend(write.tokens)
            return
        known = int(self.room[at + KNOWN])
        self._put(self.state.tokens_at(write.slot) + known, write.tokens)
        self.room[at + KNOWN] = known + len(write.tokens)

    def end(self) -> tuple[int, int]:
        """Words and runs in all."""
        for slot, tokens in self.tails.items():
            assert len(tokens) <= PIECE, f"{len(tokens)} tokens to write at once"
            at, n = self.at, len(tokens)
            self.room[at : at + n] = tokens
            self.runs += (self.state.tokens_at(slot), at, n, slot)
            self.at += n
        self.at = -(-self.at // 4) * 4  # descriptions of runs are read as vectors
        stop = self.at + len(self.runs)
        self.room[self.at : stop] = self.runs
        return stop, len(self.runs) // RUN

    def _put(self, target: int, values: Words | list[int]) -> int:
        """Values to a place in the arena; where they lie in the words."""
        at, n = self.at, len(values)
        self.room[at : at + n] = values
        if n <= PIECE:
            self.runs += (target, at, n, -1)
        else:
            for start in range(0, n, PIECE):
                self.runs += (target + start, at + start, min(PIECE, n - start), -1)
        self.at = at + n
        return at

    def _place(self, group: int, slot: int, first: int, pages: list[int]) -> None:
        """Over what this batch placed there before."""
        stop = first + len(pages)
        before = self.placed.setdefault((group, slot), [])
        open = [(first, stop)]
        for old in before:
            low, high = max(first, old.first), min(stop, old.stop)
            if low < high:
                at = old.at - old.first
                self.room[at + low : at + high] = pages[low - first : high - first]
                open = [
                    part
                    for a, b in open
                    for part in ((a, min(b, low)), (max(a, high), b))
                    if part[0] < part[1]
                ]
        base = self.state.pages_at(group, slot)
        for a, b in open:
            at = self._put(base + a, pages[a - first : b - first])
            before.append(Placed(a, b, at))
