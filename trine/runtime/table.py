"""The device table: all that the device knows of each tenant, by slot.

A step is gathered from it, so a batch only says who computes how many tokens. It keeps its
own place: `known` and `computed` grow on the device, without the host being asked. Penalties
need no counts: the tokens themselves are here, and only rows that ask for penalties read them.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from trine.core.types import Batch, Grant, Join, Sampling, Write
from trine.kernels.sampling.base import REALS, WHOLES, Rows


class Extras(NamedTuple):
    """Settings of a tenant that are lists."""

    stops: Tensor  # [n] int64
    bias: tuple[Tensor, Tensor] | None  # ids [n] int64, what to add [n] float32
    logprobs: int | None


class Table:
    """By slot; slot 0 is never given out."""

    def __init__(self, slots: int, max_len: int, page_size: int, groups: int, device: torch.device) -> None:
        self.page_size = page_size
        width = -(-max_len // page_size)
        # one position more than a context holds: its last token is sampled, and never computed
        self.tokens = torch.empty(slots, max_len + 1, dtype=torch.int32, device=device)
        self.pages = [torch.zeros(slots, width, dtype=torch.int64, device=device) for _ in range(groups)]
        self.known = torch.zeros(slots, dtype=torch.int64, device=device)  # tokens there are
        self.computed = torch.zeros(slots, dtype=torch.int64, device=device)  # tokens with KV
        self.prompt = torch.zeros(slots, dtype=torch.int64, device=device)  # tokens that are not output
        self.reals = torch.zeros(slots, len(REALS), dtype=torch.float64, device=device)
        self.wholes = torch.zeros(slots, len(WHOLES), dtype=torch.int64, device=device)
        self.extras: list[Extras | None] = [None] * slots
        self.reach = [0] * slots  # the host's own bound of `computed`: sizes launches

    def apply(self, batch: Batch) -> None:
        """Joins, grants, writes, in this order."""
        for join in batch.joins:
            self._join(join)
        if batch.grants:
            self._grant(batch.grants)
        for write in batch.writes:
            self._write(write)

    def rows(self, slots: list[int], masks: list[list[int] | None]) -> Rows:
        """What is asked of the next token of these slots; a mask is the ids that are allowed."""
        index = torch.tensor(slots, device=self.known.device)
        extras = [self._extras(slot) for slot in slots]
        return Rows(
            reals=self.reals[index],
            wholes=self.wholes[index],
            position=self.known[index],
            prompt=self.prompt[index],
            tokens=[self.tokens[slot] for slot in slots],
            stops=[extra.stops for extra in extras],
            bias=[extra.bias for extra in extras],
            allowed=[None if mask is None else self._ids(mask) for mask in masks],
        )

    def logprobs(self, slots: list[int]) -> list[int | None]:
        """How many alternatives each of these slots wants to see."""
        return [self._extras(slot).logprobs for slot in slots]

    def append(self, slots: list[int], tokens: Tensor) -> None:
        """One sampled token [slots] for each."""
        index = torch.tensor(slots, device=self.known.device)
        at = self.known[index]
        self.tokens[index, at] = tokens.int()
        self.known[index] = at + 1

    def _join(self, join: Join) -> None:
        ids = torch.frombuffer(bytearray(join.tokens), dtype=torch.int32)
        slot, sampling = join.slot, join.sampling
        self.tokens[slot, : len(ids)] = ids
        for table, pages in zip(self.pages, join.pages, strict=True):
            table[slot, : len(pages)] = self._ids(pages)
        self.known[slot] = len(ids)
        self.computed[slot] = self.reach[slot] = join.computed
        self.prompt[slot] = join.prompt
        self.reals[slot] = torch.tensor([getattr(sampling, name) for name in REALS], dtype=torch.float64)
        self.wholes[slot] = self._ids([sampling.top_k, _seed(sampling), sampling.min_tokens])
        bias = None
        if sampling.bias:
            values = torch.tensor(list(sampling.bias.values()), dtype=torch.float32)
            bias = self._ids(list(sampling.bias)), values.to(self.known.device)
        self.extras[slot] = Extras(self._ids(list(sampling.stop_ids)), bias, sampling.logprobs)

    def _grant(self, grants: list[Grant]) -> None:
        """All of a group's in one assignment: a step of 256 rows brings 16 of them."""
        for group, table in enumerate(self.pages):
            mine = [grant for grant in grants if grant.group == group]
            slots = [grant.slot for grant in mine for _ in grant.pages]
            places = chain.from_iterable(range(g.first, g.first + len(g.pages)) for g in mine)
            pages = chain.from_iterable(g.pages for g in mine)
            table[self._ids(slots), self._ids(list(places))] = self._ids(list(pages))

    def _write(self, write: Write) -> None:
        ids = torch.tensor(write.tokens, dtype=torch.int32, device=self.known.device)
        at = self.known[write.slot] + torch.arange(len(ids), device=self.known.device)
        self.tokens[write.slot, at] = ids
        self.known[write.slot] += len(ids)

    def _extras(self, slot: int) -> Extras:
        extras = self.extras[slot]
        assert extras is not None, f"slot {slot} was never joined"
        return extras

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.known.device)


def _seed(sampling: Sampling) -> int:
    """Any integer, folded into a signed word of 64 bits. The engine has drawn one if none was given."""
    assert sampling.seed is not None, "a request without a seed got to the device"
    return (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)
