"""Choosing tokens in Triton, for NVIDIA and AMD GPUs. Nothing waits for the device.

Two launches serve every row that has no filter: greedy rows do not look at chances at all. Rows with filters are
cut and raced again, rows with edits are copied first; which they are the host knows, so that other rows pay
nothing for them. All numbers are read on the device by slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trine.kernels.installed import missing

from .base import Ask, Choice, Rows, Seen

CHUNK = 1024  # logits of a program: a row of 128,256 is 126 of them, about one for each multiprocessor
WARPS = 4  # of a program with one chunk
WIDE = 4096  # logits of a program that counts or collects
BINS, FACTS = 4096, 4  # of kernels/jit/filters.py
ROOM = 8192  # depths of a row that can be collected


class Plan(NamedTuple):
    """What was found in the asks of a step; kept while the next one has the same."""

    asks: list[Ask]
    filters: Tensor | None  # [rows that cut] their places
    edits: list[int]  # rows whose asks always edit
    penalties: bool


class Edited(NamedTuple):
    """Rows that were copied and changed."""

    work: Tensor  # [edits, vocab] float32
    where: Tensor  # [rows] which of `work` each is; -1: none
    flags: Tensor  # [edits] int32


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
        from trine.kernels.jit import edits, filters, quick, sampling

        self.jit, self.edits, self.filters = quick(sampling), quick(edits), quick(filters)
        pdl = want is not None and want.device == "cuda" and want.capability >= (9, 0)
        self.pdl: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
        self.plan = Plan([], None, [], False)
        self.chunk, self.wide, self.room, self.warps = CHUNK, WIDE, ROOM, WARPS

    def choose(self, logits: Tensor, rows: Rows) -> Choice:
        plan = self._plan(rows)
        edited = None
        if plan.edits or rows.early or rows.allowed:
            edited = self._edit(logits, rows, plan)
        said, *found = self._race(logits, rows, edited)
        if plan.filters is not None:
            self._filter(logits, rows, edited, plan.filters, said, *found)
        return Choice(said)

    def logprobs(self, logits: Tensor, choice: Choice, which: list[int], most: int, rows: Rows) -> Seen:
        vocab, device, places = logits.shape[1], logits.device, rows.upload(which)
        count, chunks = len(which), -(-vocab // self.chunk)
        tops = torch.empty(2, count, chunks, dtype=torch.float32, device=device)
        ranks = torch.empty(count, chunks, dtype=torch.int32, device=device)
        keys = torch.empty(count, chunks, max(most, 1), dtype=torch.int64, device=device)
        chances = torch.empty(count, 1 + most, dtype=torch.float32, device=device)
        ids = torch.empty(count, 1 + most, dtype=torch.int32, device=device)
        self.jit.see[(chunks, count)](
            logits, places, choice.said, tops[0], tops[1], ranks, keys, logits.stride(0), vocab, chunks,
            most, self.chunk, num_warps=self.warps, **self.pdl,
        )  # fmt: skip
        self.jit.report[(count,)](
            logits, places, choice.said, tops[0], tops[1], ranks, keys, chances, ids, logits.stride(0), vocab, chunks,
            most, power(chunks), power(chunks * most), num_warps=8, **self.pdl,
        )  # fmt: skip
        return Seen(chances, ids)

    def _plan(self, rows: Rows) -> Plan:
        if self.plan.asks is not rows.asks:
            asks = rows.asks
            filters = [i for i, ask in enumerate(asks) if ask.filters and ask.draws]
            edits = [i for i, ask in enumerate(asks) if ask.penalties or ask.bias is not None]
            places = rows.upload(filters) if filters else None
            self.plan = Plan(asks, places, edits, any(ask.penalties for ask in asks))
        return self.plan

    def _race(self, logits: Tensor, rows: Rows, edited: Edited | None) -> tuple[Tensor, ...]:
        """What is said of all rows, the largest logits of their chunks, and of themselves, and how deep they go."""
        count, vocab = logits.shape
        assert vocab < 2**19, "bins of filters have 19 bits to count in"
        state, chunks, device = rows.state, -(-vocab // self.chunk), logits.device
        tops = torch.empty(2, count, chunks, dtype=torch.float32, device=device)
        top = torch.empty(count, dtype=torch.float32, device=device)
        limit = torch.empty(count, dtype=torch.int32, device=device)
        ids = torch.empty(count, chunks, dtype=torch.int32, device=device)
        said = torch.empty(2, count, dtype=torch.int32, device=device)
        work, where, flags = edited or (logits, rows.slots, rows.slots)
        self.jit.race[(chunks, count)](
            logits, work, where, rows.slots, state.records, state.reals, state.wholes, tops[0], tops[1], ids,
            logits.stride(0), vocab, chunks, edited is not None, self.chunk, num_warps=self.warps, **self.pdl,
        )  # fmt: skip
        self.jit.settle[(count,)](
            tops[0], tops[1], ids, rows.slots, state.reals, state.wholes, where, flags, top, limit, said,
            chunks, count, vocab,
            edited is not None, power(chunks), num_warps=2, **self.pdl,
        )  # fmt: skip
        return said, tops[0], top, limit

    def _filter(
        self,
        logits: Tensor,
        rows: Rows,
        edited: Edited | None,
        which: Tensor,
        said: Tensor,
        tops: Tensor,
        top: Tensor,
        limit: Tensor,
    ) -> None:
        """Choose again for the rows `which`, among the ids that their filters leave."""
        vocab, count, state = logits.shape[1], len(which), rows.state
        chunks = tops.shape[1]
        cuts = torch.empty(count, dtype=torch.int32, device=logits.device)
        races = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
        ids = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
        work, where, _ = edited or (logits, rows.slots, None)
        flag, parts, each = edited is not None, -(-vocab // self.wide), self.wide // self.chunk
        size = logits.stride(0), vocab, chunks
        words = [count * n for n in (4, 2 * BINS, FACTS, self.room)]  # sums, bins, facts, what is collected
        space = torch.empty(sum(words), dtype=torch.int32, device=logits.device)
        space[: sum(words[:2])].zero_()
        sums, histogram, found, depths = space.split(words)
        sums, histogram = sums.view(torch.int64), histogram.view(torch.int64)
        self.filters.spread[(parts, count)](
            logits, work, where, rows.slots, state.reals, state.wholes, which, top, limit, tops, histogram, *size,
            flag, each, self.wide, num_warps=8, **self.pdl,
        )  # fmt: skip
        self.filters.bracket[(count,)](
            rows.slots, state.reals, state.wholes, which, histogram, found, vocab, num_warps=8, **self.pdl
        )
        self.filters.collect[(parts, count)](
            logits, work, where, rows.slots, state.reals, state.wholes, which, top, limit, tops, found, sums, depths,
            *size, flag, each, self.wide, self.room, num_warps=8, **self.pdl,
        )  # fmt: skip
        self.filters.select[(count,)](
            logits, work, where, rows.slots, state.reals, state.wholes, which, top, limit, found, sums, depths, cuts,
            *size[:2], flag, self.wide, self.room, num_warps=16, **self.pdl,
        )  # fmt: skip
        self.jit.race_above[(chunks, count)](
            logits, work, where, rows.slots, state.records, state.reals, state.wholes, which, top, cuts, tops,
            races, ids, logits.stride(0), vocab, chunks, edited is not None, self.chunk, num_warps=self.warps, **self.pdl,
        )  # fmt: skip
        self.jit.settle_above[(count,)](
            races, ids, which, top, said, chunks, power(chunks), num_warps=2, **self.pdl
        )

    def _edit(self, logits: Tensor, rows: Rows, plan: Plan) -> Edited:
        """Copies of the rows that have edits, changed."""
        vocab, device, state = logits.shape[1], logits.device, rows.state
        edits = sorted({*plan.edits, *rows.early, *rows.allowed})
        count, chunks = len(edits), -(-vocab // self.chunk)
        packed, entries = _lists(edits, rows)
        sent = rows.upload(packed)
        where, places, restricted, lists = sent.split(
            [len(rows.asks), count, count, len(packed) - len(rows.asks) - 2 * count]
        )
        work = torch.empty(count, vocab, dtype=torch.float32, device=device)
        flags = torch.zeros(count, dtype=torch.int32, device=device)
        self.edits.bare[(chunks, count)](
            logits,
            places,
            restricted,
            work,
            flags,
            logits.stride(0),
            vocab,
            self.chunk,
            num_warps=self.warps,
            **self.pdl,
        )
        if entries:
            self.edits.change[(count,)](
                logits, places, rows.slots, state.records, state.wholes, lists, work, logits.stride(0), vocab,
                count, entries, self.chunk, num_warps=self.warps, **self.pdl,
            )  # fmt: skip
        if plan.penalties:
            self.edits.penalize[(chunks, count)](
                places, rows.slots, state.records, state.reals, state.tokens, work, vocab, state.tokens.shape[1],
                self.chunk, self.chunk, num_warps=self.warps, **self.pdl,
            )  # fmt: skip
        return Edited(work, where, flags)


def _lists(edits: list[int], rows: Rows) -> tuple[np.ndarray, int]:
    """For one upload: where each row is among the edited ones, which those are, which are restricted, and their
    lists as `change` wants them; and how many ids these have."""
    early, empty = set(rows.early), np.zeros(0, np.int64)
    ids = [rows.allowed.get(i, empty) for i in edits]
    ids += [rows.asks[i].stops if i in early else empty for i in edits]
    biases = [rows.asks[i].bias for i in edits]
    ids += [empty if bias is None else bias[0] for bias in biases]
    lengths = np.array([len(part) for part in ids])
    begins = np.zeros((3, len(edits) + 1), np.int64)
    ends = np.cumsum(lengths).reshape(3, len(edits))
    begins[:, 1:] = ends
    begins[1:, 0] = ends[:-1, -1]
    entries = int(ends[-1, -1])
    added = [bias[1].view(np.int32) for bias in biases if bias is not None]
    values = np.zeros(entries, np.int64)
    if added:
        values[begins[2, 0] :] = np.concatenate(added)
    where = np.full(len(rows.asks), -1)
    where[edits] = np.arange(len(edits))
    restricted = np.array([i in rows.allowed for i in edits], np.int64)
    return np.concatenate((where, edits, restricted, begins.reshape(-1), *ids, values)), entries


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


PLUGIN = Triton
