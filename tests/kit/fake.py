"""A fake device: the whole device side in plain Python, with no torch and no numbers.

A KV cell holds a digest of all tokens up to its position (and of who may read it), so a page is
right or wrong as a whole history, not by luck. The "model" hashes the cells it *reads back*
through the page tables of every group; it never looks at the request. Pages in a shared run it reads
through the table of *another* member, as a kernel would. What the device checks by itself: each cell
it reads is the one that was meant, each input token is known, page 0 and slot 0 are never used, a
shared run is one and complete before the step. It does not know of trees, locks or scheduling.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trine.core.types import Batch, Group, Join, Logprob, Result, Row, Sampling, Share

from .shares import orderly

POISON = -1  # what a page holds that was freed, or never written
VOCAB = 50
NAN = "logits are not numbers"


def digest(before: int, token: int) -> int:
    """Of a history that ends with `token`."""
    return hash((before, token, 0x7E1E))


def spoilt(sampling: Sampling, made: int) -> bool:
    """Whether the logits of output token `made` are not numbers: a bias of -100 for the id `made` says so."""
    return sampling.bias.get(made) == -100.0


@dataclass(frozen=True)
class Model:
    """The next token, from the cells that each group can see. Shared by device and oracle."""

    windows: tuple[int, ...]
    vocab: int = VOCAB

    def see(self, cells: list[list[int]], first: list[int], position: int) -> list[list[int]]:
        """By group, what a token at `position` looks back on; a group's cells begin at its `first`."""
        return [
            mine[max(0, position - w if w else 0) - low : position - low]
            for mine, low, w in zip(cells, first, self.windows, strict=True)
        ]

    def alone(self, chain: list[int], sampling: Sampling, made: int, allowed: list[int] | None = None) -> int:
        """The token after a whole history, which every group has."""
        kinds, end = len(self.windows), len(chain)
        return self.choose(self.see([chain] * kinds, [0] * kinds, end), sampling, end, made, allowed)

    def choose(
        self,
        seen: list[list[int]],
        sampling: Sampling,
        position: int,
        made: int,
        allowed: list[int] | None = None,
    ) -> int:
        """The token for `position`, the request's output token number `made`."""
        noise = (sampling.seed, position) if sampling.temperature else 0
        number = hash((noise, made, *map(tuple, seen)))
        if allowed is not None:
            return allowed[number % len(allowed)]
        token = number % self.vocab
        while made < sampling.min_tokens and token in sampling.stop_ids:
            token = (token + 1) % self.vocab
        return token


@dataclass(slots=True)
class Place:
    """What the device knows of a slot's tenant."""

    tokens: list[int]  # known: told by the host, or sampled here
    prompt: int
    pages: list[list[int]]
    sampling: Sampling
    tag: int
    chain: list[int] = field(default_factory=list)  # digests of what is computed
    guesses: list[int] = field(default_factory=list)  # the drafter's, after the last known token
    spoilt: bool = False  # a row of it gave no number: its request ends


@dataclass(slots=True)
class Read:
    """A row between forward and sample: what was read, by group from `first[group]` on."""

    row: Row
    place: Place
    end: int
    inputs: list[int]
    cells: list[list[int]]
    first: list[int]


class FakeExecutor:
    """An Executor. `lazy`: nothing is computed before its result is asked for, so the host
    is always one step behind, and an order that it changes after launching is seen changed."""

    def __init__(
        self,
        groups: list[Group],
        page_size: int,
        slots: int,
        max_len: int,
        drafts: int = 0,
        rng: random.Random | None = None,
        *,
        vocab: int = VOCAB,
        budget: int | None = None,  # tokens in a step, at most
        lazy: bool = False,
        wire: bool = False,  # batches are encoded and decoded, as between machines
        skill: float = 0.7,  # how often a guess is right
        tag: Callable[[Sampling], int] = lambda _: 0,  # who may read the KV
    ) -> None:
        self.model = Model(tuple(g.window for g in groups), vocab)
        self.kv = [[[POISON] * page_size for _ in range(g.pages)] for g in groups]
        self.size, self.slots, self.max_len, self.drafts = page_size, slots, max_len, drafts
        self.budget = budget
        self.rng, self.lazy, self.wire, self.skill, self.tag = rng or random.Random(0), lazy, wire, skill, tag
        self.full = [g for g, group in enumerate(groups) if not group.window]
        self.watch: Callable[[Batch], None] = lambda _: None  # sees each batch as it is launched
        self.places: dict[int, Place] = {}
        self.shares: list[Share] = []  # in force
        self.others: dict[int, list[tuple[Share, int]]] = {}  # by slot: its runs, and who else is in each
        self.read: dict[int, list[Read]] = {}  # by step, forward done and not sampled
        self.results: dict[int, Result] = {}
        self.queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.calls: list[Callable[[], None]] = []
        self.step = 0  # the last one launched
        self.taken = 0  # results
        self.seen: Counter[str] = Counter()  # what happened, for coverage

    # ---- the Executor protocol ----------------------------------------------------------
    def forward(self, batch: Batch) -> None:
        assert batch.step > self.step, f"step {batch.step} after {self.step}"
        self.step = batch.step
        self.watch(batch)
        self._enqueue(
            self._forward, msgspec.convert(msgspec.to_builtins(batch), Batch) if self.wire else batch
        )

    def sample(self, batch: Batch, masks: list[list[int] | None] | None) -> None:
        self._enqueue(self._sample, batch.step, masks)

    def done(self, step: int) -> bool:
        """When lazy, time goes by only as one looks: each look does the oldest order."""
        if step not in self.results and self.queue:
            self._do()
        return step in self.results

    def result(self, step: int) -> Result:
        while step not in self.results:
            assert self.queue, f"step {step} was never sampled: waiting would last for ever"
            self._do()
        self.taken += 1
        return self.results.pop(step)

    def on_done(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def call(self, name: str, **values: Any) -> list[Any]:
        return [None]

    def close(self) -> None:
        self.queue.clear()

    def poison(self, group: int, pages: list[int]) -> None:
        """These pages are free now: in order with the steps, what they hold is spoiled."""
        self._enqueue(self._poison, group, pages)

    # ---- in order -----------------------------------------------------------------------
    def _enqueue(self, order: Callable[..., None], *what: Any) -> None:
        self.queue.append((order, what))
        if not self.lazy:
            self._do()

    def _do(self) -> None:
        order, what = self.queue.popleft()
        order(*what)

    def _poison(self, group: int, pages: list[int]) -> None:
        for page in pages:
            self.kv[group][page] = [POISON] * self.size

    def _forward(self, batch: Batch) -> None:
        self._orders(batch)
        self._share(batch)
        slots = [r.slot for r in batch.rows]
        assert len(set(slots)) == len(slots), "two rows of one slot"
        assert batch.rows, "a batch of no rows"
        if self.budget is not None:
            assert sum(r.count for r in batch.rows) <= self.budget, "more tokens than the budget"
        self.read[batch.step] = [self._compute(row) for row in batch.rows]

    def _orders(self, batch: Batch) -> None:
        """Joins, copies, grants, writes: in this order."""
        for join in batch.joins:
            self._join(join)
        for copy in batch.copies:
            kv = self.kv[copy.group]
            assert 0 < copy.tokens < self.size and copy.source and copy.target, f"not a copy: {copy}"
            assert copy.source != copy.target
            kv[copy.target] = kv[copy.source][: copy.tokens] + [POISON] * (self.size - copy.tokens)
            self.seen["copies"] += 1
        for grant in batch.grants:
            place = self.places[grant.slot]
            pages = place.pages[grant.group]
            assert 0 <= grant.first <= len(pages), f"a hole in the page table: {grant}"
            self.seen["corrections"] += grant.first < len(pages) and any(grant.pages)
            pages[grant.first : grant.first + len(grant.pages)] = grant.pages
        for write in batch.writes:
            place = self.places[write.slot]
            assert write.tokens and all(0 <= t < self.model.vocab for t in write.tokens), write
            place.tokens += write.tokens
            place.guesses = []
            self.seen["forced"] += len(write.tokens)

    def _join(self, join: Join) -> None:
        assert 0 < join.slot <= self.slots, f"slot {join.slot} is not for rows"
        tokens = array("i", join.tokens).tolist()
        assert 0 <= join.computed < len(tokens) <= self.max_len, (
            f"nothing to compute: {join.computed} of {len(tokens)}"
        )
        assert 0 < join.prompt <= len(tokens)
        place = Place(
            tokens, join.prompt, [list(p) for p in join.pages], join.sampling, self.tag(join.sampling)
        )
        for token in tokens[: join.computed]:
            place.chain.append(digest(place.chain[-1] if place.chain else place.tag, token))
        self.places[join.slot] = place
        self.seen["joins"] += 1
        self.seen["wholly cached"] += join.computed == len(tokens) - 1 and join.computed > 0
        self.seen["resumed"] += len(tokens) > join.prompt

    def _share(self, batch: Batch) -> None:
        """What is in force must be true at each step: after the orders of its batch, before its rows."""
        if batch.shares is not None:
            assert batch.shares != self.shares, "told again what is in force"
            orderly(batch.shares)
            self.shares, self.others = batch.shares, {}
            for share in self.shares:
                for slot, other in zip(share.slots, share.slots[1:] + share.slots[:1], strict=True):
                    self.others.setdefault(slot, []).append((share, other))
            self.seen["shares"] += 1
            self.seen["shares in shares"] += any(len(runs) > 1 for runs in self.others.values())
            self.seen["shares end"] += not self.shares
        for share in self.shares:
            assert self.full, "a run without a group that keeps all"
            self._whole(share)
        self.seen["rows that share"] += sum(row.slot in self.others for row in batch.rows)

    def _whole(self, share: Share) -> None:
        """The same pages in all tables, and in them the KV of all that is said before."""
        size, first, end = self.size, share.first, share.first + share.count
        for slot in share.slots:
            assert slot in self.places, f"slot {slot} has no tenant: {share}"
            place = self.places[slot]
            assert len(place.chain) >= end * size, f"slot {slot} has not computed all of {share}"
            for group in self.full:
                pages = place.pages[group][first:end]
                assert pages == self.places[share.slots[0]].pages[group][first:end], f"other pages: {share}"
                cells = [cell for page in pages for cell in self.kv[group][page]]
                assert all(pages) and len(pages) == share.count, f"slot {slot}: a page is missing: {share}"
                assert cells == place.chain[first * size : end * size], f"slot {slot}: not its KV: {share}"

    def _compute(self, row: Row) -> Read:
        place = self.places[row.slot]
        start, known = len(place.chain), len(place.tokens)
        end = start + row.count
        sure = end - row.drafts
        assert row.count > row.drafts >= 0, f"a row that computes nothing: {row}"
        assert row.sample == (sure == known), f"{row}: samples after {sure} of {known} tokens"
        inputs = place.tokens[start:sure] + place.guesses[: row.drafts]
        assert len(inputs) == row.count, f"{row}: an input token is unknown"
        assert end <= self.max_len, f"{row}: past the end of the table"
        for token in inputs:
            place.chain.append(digest(place.chain[-1] if place.chain else place.tag, token))
        for group, kv in enumerate(self.kv):
            cells = [POISON] * row.count if place.spoilt else place.chain[start:]
            self._write(kv, place.pages[group], start, cells)
        first = [max(0, start - w + 1) if w else 0 for w in self.model.windows]
        cells = [self._look(place, group, low, end, row.slot) for group, low in enumerate(first)]
        self.seen["tokens"] += row.count
        self.seen["rows"] += 1
        return Read(row, place, end, inputs, cells, first)

    def _write(self, kv: list[list[int]], pages: list[int], start: int, cells: list[int]) -> None:
        for position, cell in enumerate(cells, start):
            index = position // self.size
            assert index < len(pages) and pages[index], f"no page to write position {position}"
            kv[pages[index]][position % self.size] = cell

    def _look(self, place: Place, group: int, low: int, end: int, slot: int) -> list[int]:
        """The cells of positions [low, end), through the page table; each must be the right one."""
        kv, size, skip = self.kv[group], self.size, low // self.size
        cells: list[int] = []
        pages = place.pages[group][skip : -(-end // size)]
        if group in self.full:  # low is 0
            for share, other in self.others.get(slot, ()):
                theirs = self.places[other].pages[group]
                pages[share.first : share.first + share.count] = theirs[share.first :][: share.count]
        for page in pages:
            assert page, f"slot {slot} group {group}: page 0 is in [{low}, {end})"
            cells += kv[page]
        cells = cells[low - skip * size : end - skip * size]
        if cells != place.chain[low:end] and not place.spoilt:
            bad = next(i for i, (a, b) in enumerate(zip(cells, place.chain[low:end], strict=True)) if a != b)
            page = place.pages[group][(low + bad) // size]
            what = "poison" if cells[bad] == POISON else "something else"
            raise AssertionError(
                f"slot {slot} group {group}: position {low + bad}, page {page}, holds {what}"
            )
        return cells

    def _sample(self, step: int, masks: list[list[int] | None] | None) -> None:
        reads = self.read.pop(step)
        assert masks is None or len(masks) == len(reads)
        tokens: list[list[int]] = []
        errors: list[str | None] = []
        for index, read in enumerate(reads):
            allowed = masks[index] if masks else None
            got = self._verify(read, allowed) if read.row.sample else []
            errors.append(NAN if got is None else None)
            tokens.append(got or [])
        want = any(r.place.sampling.logprobs is not None for r in reads)
        logprobs = [[Logprob(t, -float(t), 1 + t) for t in got] for got in tokens] if want else None
        self.results[step] = Result(step, tokens, logprobs, errors=errors if any(errors) else None)
        for call in self.calls:
            call()

    def _verify(self, read: Read, allowed: list[int] | None) -> list[int] | None:
        """Guesses from left to right, then one token of our own. None: there is no number to choose by."""
        row, place, got = read.row, read.place, []
        assert allowed is None or not row.drafts, "a mask is for one token: it cannot cover guesses"
        position = read.end - row.drafts
        while True:
            over = any(t in place.sampling.stop_ids for t in got)
            if spoilt(place.sampling, position - place.prompt) and not over:
                self._spoil(read, position)
                place.tokens += [*got, 0]  # what is in flight goes on with something
                place.guesses = [0] * self.drafts
                return None
            seen = self.model.see(read.cells, read.first, position)
            token = self.model.choose(seen, place.sampling, position, position - place.prompt, allowed)
            got.append(token)
            if position == read.end or read.inputs[position - read.end] != token:
                break
            position += 1
        self.seen["masks"] += allowed is not None
        self.seen["drafts"] += row.drafts
        self.seen["accepted"] += len(got) - 1
        del place.chain[position:]
        place.tokens += got
        place.guesses = self._guess(place) if self.drafts else []
        return got

    def _spoil(self, read: Read, position: int) -> None:
        """What this row computed, and what the slot computes from now on, must be read by nobody else."""
        place, start = read.place, read.end - read.row.count
        for kv, pages in zip(self.kv, place.pages, strict=True):
            self._write(kv, pages, start, [POISON] * read.row.count)
        place.spoilt = True
        del place.chain[position:]
        self.seen["spoilt rows"] += 1

    def _guess(self, place: Place) -> list[int]:
        """The drafter: it reads nothing, so it may be wrong, and often is."""
        chain, guesses, token = place.chain[:], [], place.tokens[-1]
        for _ in range(self.drafts):
            chain.append(digest(chain[-1], token))
            token = self.rng.randrange(self.model.vocab)
            if self.rng.random() < self.skill:
                token = self.model.alone(chain, place.sampling, len(chain) - place.prompt)
            guesses.append(token)
        return guesses
