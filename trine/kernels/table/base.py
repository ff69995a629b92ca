"""The contract of the device table's operations, and how its words lie.

All that a device knows of its tenants lies in one array of words of 32 bits, the arena, so that orders of
any kind are runs of words to copy. The host's order of things is kept by whoever packs the orders: runs of
one call never overlap. Slot 0 has no tenant: rows that only fill a step up have it, and nothing of it counts.

It knows nothing of batches, requests or models.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
WHOLES = ("top_k", "seed", "min_tokens")

# Words of a slot's record: three counts and a spare one, then REALS (float64), then WHOLES (int64).
KNOWN, COMPUTED, PROMPT = 0, 1, 2
AT_REALS = 4
AT_WHOLES = AT_REALS + 2 * len(REALS)
RECORD = 24

PIECE = 1024  # words of a run, at most: each is one program's work
RUN = 4  # words that describe a run: where to, from where, how many, and whose tokens it is behind (-1: none)


class State(NamedTuple):
    """The arena and its parts. The counts by slot are views with strides."""

    arena: Tensor  # [words] int32
    tokens: Tensor  # [slots, positions] int32
    pages: Tensor  # [groups, slots, pages] int32
    records: Tensor  # [slots, RECORD] int32
    known: Tensor  # [slots] int32    tokens there are
    computed: Tensor  # [slots] int32 tokens with KV
    prompt: Tensor  # [slots] int32   tokens that are not output
    reals: Tensor  # [slots, len(REALS)] float64
    wholes: Tensor  # [slots, len(WHOLES)] int64
    page_size: int

    def tokens_at(self, slot: int) -> int:
        """Where in the arena a slot's tokens begin."""
        return int(self.tokens.storage_offset()) + slot * self.tokens.shape[1]

    def pages_at(self, group: int, slot: int) -> int:
        _, slots, width = self.pages.shape
        return int(self.pages.storage_offset()) + (group * slots + slot) * width

    def record_at(self, slot: int) -> int:
        return int(self.records.storage_offset()) + slot * RECORD


class Singles(NamedTuple):
    """What a step sees of rows that compute one token each."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    write: list[Tensor]  # by group: [rows]  page * page_size + offset
    lengths: Tensor  # [rows]


class Keeper(Protocol):
    """A way to work on the table. Results hold for at least three more calls; indices are int64 on a CPU, int32
    elsewhere."""

    name: str
    order: int

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        """`want.device`: "cpu", "cuda", ..."""
        ...

    def apply(self, state: State, words: Tensor, runs: int) -> None:
        """`words` [n] int32: anything, and its last `runs` * RUN words describe runs of at most PIECE words.

        A run behind a slot's tokens goes to (where to + known), then counts in known; at most one a slot."""
        ...

    def singles(self, state: State, slots: Tensor) -> Singles:
        """The next token of each of `slots` [rows], which counts as computed from now on.

        Slots are distinct but for 0, which stays as it is: id, position, write and length are 0."""
        ...

    def ragged(self, state: State, slots: Tensor, starts: Tensor, owner: Tensor) -> Singles:
        """The same for rows of any count: slots [rows], starts [rows + 1], owner [tokens]: each token's row."""
        ...

    def append(self, state: State, slots: Tensor, tokens: Tensor) -> None:
        """One token [rows] behind those of each of `slots` [rows], which are distinct but for 0."""
        ...


def make_state(slots: int, positions: int, width: int, groups: int, page_size: int, device: Any) -> State:
    """All zero. Sections begin at multiples of 16 bytes, as vector loads like it."""
    sizes = [slots * RECORD, slots * positions, groups * slots * width]
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // 4) * 4)
    assert starts[-1] < 2**31, "the table is too large for offsets of 32 bits"
    arena = torch.zeros(starts[-1], dtype=torch.int32, device=device)
    records, tokens, pages = (arena[start : start + size] for start, size in zip(starts, sizes, strict=False))
    records = records.view(slots, RECORD)
    return State(
        arena=arena,
        tokens=tokens.view(slots, positions),
        pages=pages.view(groups, slots, width),
        records=records,
        known=records[:, KNOWN],
        computed=records[:, COMPUTED],
        prompt=records[:, PROMPT],
        reals=records.view(torch.float64)[:, AT_REALS // 2 : AT_WHOLES // 2],
        wholes=records.view(torch.int64)[:, AT_WHOLES // 2 : AT_WHOLES // 2 + len(WHOLES)],
        page_size=page_size,
    )
