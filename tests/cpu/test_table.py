"""The table, the store and the runner's step, against the same arithmetic in plain Python."""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

import pytest
import torch

from trine.core.types import Batch, Copy, Grant, Group, Join, Row, Sampling, Write
from trine.errors import Unsupported
from trine.kernels.attention.base import Step
from trine.kernels.sampling.reference import Reference
from trine.kernels.table.base import PIECE
from trine.platforms.cpu import Cpu
from trine.runtime.sampler import Sampler
from trine.runtime.staging import DEEP, FIRST, Reports, Staging
from trine.runtime.store import Store
from trine.runtime.table import Table

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0, seed=0)


class Heads(NamedTuple):
    kv_heads: int
    head_dim: int


def table(slots: int = 5, max_len: int = 24, page_size: int = 4, groups: int = 2) -> Table:
    return Table(slots, max_len, page_size, groups, CPU)


def join(
    slot: int,
    tokens: list[int],
    pages: list[list[int]],
    computed: int = 0,
    prompt: int | None = None,
    sampling: Sampling = GREEDY,
) -> Join:
    own = len(tokens) if prompt is None else prompt
    return Join(slot, array("i", tokens).tobytes(), own, pages, computed, sampling)


def test_a_step_is_the_tables_arithmetic() -> None:
    """Random tenants and rows: every field of a step against loops."""
    rng = random.Random(4)
    for _ in range(30):
        t, page_size = table(slots=9, max_len=40), 4
        tenants: dict[int, tuple[list[int], list[list[int]], int]] = {}
        for slot in rng.sample(range(1, 9), 5):
            n = rng.randint(2, 40)
            tokens = [rng.randrange(1000) for _ in range(n)]
            pages = [[rng.randint(1, 99) for _ in range(-(-n // page_size))] for _ in range(2)]
            tenants[slot] = tokens, pages, rng.randrange(n)
            t.apply(Batch(0, [], joins=[join(slot, tokens, pages, tenants[slot][2])]))
        for _ in range(2):  # the second step goes on where the first ended
            picked = [s for s, (tokens, _, computed) in tenants.items() if computed < len(tokens)]
            rng.shuffle(picked)
            if not picked:
                break
            rows = [
                Row(s, rng.randint(1, len(tenants[s][0]) - tenants[s][2]), rng.random() < 0.5) for s in picked
            ]
            rows.sort(key=lambda row: row.count > 1)
            check_step(t.gather(rows), rows, tenants, page_size)
            for row in rows:
                tokens, pages, computed = tenants[row.slot]
                tenants[row.slot] = tokens, pages, computed + row.count
                assert t.state.computed[row.slot] == t.reach[row.slot] == computed + row.count


def check_step(
    step: Step, rows: list[Row], tenants: dict[int, tuple[list[int], list[list[int]], int]], page_size: int
) -> None:
    ids, positions, starts, wanted = [], [], [0], []
    write: list[list[int]] = [[], []]
    for row in rows:
        tokens, pages, computed = tenants[row.slot]
        for p in range(computed, computed + row.count):
            ids.append(tokens[p])
            positions.append(p)
            for group in (0, 1):
                write[group].append(pages[group][p // page_size] * page_size + p % page_size)
        starts.append(len(ids))
        if row.sample:
            wanted.append(len(ids) - 1)
    assert step.ids.tolist() == ids
    assert step.positions.tolist() == positions
    assert step.starts.tolist() == starts
    assert step.wanted.tolist() == wanted
    assert [w.tolist() for w in step.write] == write
    lengths = [tenants[r.slot][2] + r.count for r in rows]
    assert step.lengths.tolist() == lengths
    assert step.slots.tolist() == [r.slot for r in rows]
    assert step.singles == sum(r.count == 1 for r in rows)
    assert step.bound == (len(ids), max(r.count for r in rows), max(lengths))
    for group in (0, 1):
        for row, length in zip(rows, lengths, strict=True):
            needed = -(-length // page_size)
            assert step.pages[group][row.slot, :needed].tolist() == tenants[row.slot][1][group][:needed]


def test_orders_are_applied_in_their_order() -> None:
    """One batch that joins, grants over the join, and writes behind it."""
    t = table()
    t.apply(
        Batch(
            1,
            [],
            joins=[join(2, [5, 6, 7], [[11], [21]]), join(3, [8], [[12], [22]])],
            grants=[Grant(2, 0, 0, [31, 32]), Grant(2, 1, 1, [41]), Grant(3, 0, 2, [33])],
            writes=[Write(2, [9, 10]), Write(3, [4])],
        )
    )
    assert t.state.tokens[2, :5].tolist() == [5, 6, 7, 9, 10] and t.state.known[2] == 5
    assert t.state.tokens[3, :2].tolist() == [8, 4] and t.state.known[3] == 2
    assert t.pages[0][2, :2].tolist() == [31, 32] and t.pages[1][2, :2].tolist() == [21, 41]
    assert t.pages[0][3, :3].tolist() == [12, 0, 33]
    t.apply(Batch(2, [], grants=[Grant(3, 0, 0, [])]))
    t.apply(Batch(3, [], joins=[join(2, [1], [[50], [60]], sampling=Sampling(seed=-1, top_k=3))]))
    assert t.state.known[2] == 1 and t.state.computed[2] == 0 and t.pages[0][2, 0] == 50


def test_later_orders_win() -> None:
    """Random joins, grants over them and over one another, and writes, against plain lists."""
    rng = random.Random(9)
    t = table(slots=6, max_len=40)
    tokens: dict[int, list[int]] = {}
    pages = {(g, s): [0] * 10 for g in (0, 1) for s in range(6)}
    for step in range(60):
        batch = Batch(step, [])
        for slot in rng.sample(range(1, 6), rng.randint(0, 3)):
            tokens[slot] = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
            fresh = [[rng.randrange(1, 99) for _ in range(rng.randint(0, 6))] for _ in (0, 1)]
            batch.joins.append(join(slot, tokens[slot], fresh))
            for g in (0, 1):
                pages[g, slot][: len(fresh[g])] = fresh[g]
        for _ in range(rng.randint(0, 6) if tokens else 0):
            g, slot, first = rng.randrange(2), rng.choice(list(tokens)), rng.randrange(8)
            granted = [rng.randrange(1, 99) for _ in range(rng.randint(1, 10 - first))]
            batch.grants.append(Grant(slot, g, first, granted))
            pages[g, slot][first : first + len(granted)] = granted
        for _ in range(rng.randint(0, 4) if tokens else 0):
            slot = rng.choice(list(tokens))
            written = [rng.randrange(1000) for _ in range(rng.randint(1, 3))]
            if len(tokens[slot]) + len(written) <= 40:
                batch.writes.append(Write(slot, written))
                tokens[slot] = tokens[slot] + written
        t.apply(batch)
        for slot, known in tokens.items():
            assert t.state.known[slot] == t.least[slot] == len(known)
            assert t.state.tokens[slot, : len(known)].tolist() == known
        for (g, slot), expected in pages.items():
            assert t.pages[g][slot].tolist() == expected


def test_a_long_prompt_is_cut_in_pieces() -> None:
    ids = list(range(3 * PIECE + 7))
    t = Table(3, 4096, 16, 1, CPU)
    t.apply(Batch(1, [], joins=[join(2, ids, [list(range(1, 200))])], writes=[Write(2, [5, 6])]))
    assert t.state.tokens[2, : len(ids) + 2].tolist() == [*ids, 5, 6]
    assert t.pages[0][2, :199].tolist() == list(range(1, 200))
    assert not t.state.tokens[1].any()


def test_singles_are_a_step_of_one_token_each() -> None:
    """With rows of slot 0 among them, which stay what they are."""
    one, two = table(), table()
    for t in (one, two):
        joins = [
            join(s, [10 * s + i for i in range(9)], [[s, s + 4, 7], [9, s, s]], 2 * s) for s in (1, 3, 4)
        ]
        t.apply(Batch(1, [], joins=joins))
    for _ in range(2):
        slots = one.slots([3, 1], 4)
        found = one.singles(slots)
        one.reached([Row(3, 1, True), Row(1, 1, True)])
        step = two.gather([Row(3, 1, True), Row(1, 1, True)])
        for name in ("ids", "positions", "lengths"):
            assert getattr(found, name).tolist() == [*getattr(step, name).tolist(), 0, 0]
        assert [w.tolist() for w in found.write] == [[*w.tolist(), 0, 0] for w in step.write]
        assert torch.equal(one.state.arena, two.state.arena) and one.reach == two.reach
    assert one.slots([3, 1], 4) is one.slots([3, 1], 4) and len(one.slots([3, 1])) == 2


def test_settings_by_slot() -> None:
    t = table()
    hot = Sampling(
        0.7, 0.9, 5, 0.1, 1.1, 0.2, 0.3, 2**63 + 5, min_tokens=4, stop_ids=(8, 9), bias={3: 1.5}, logprobs=2
    )
    joins = [join(1, [1, 2, 3], [[1], [1]], prompt=2, sampling=hot), join(4, [1], [[2], [2]])]
    t.apply(Batch(1, [], joins=joins))
    state, rows = t.state, t.asked([4, 1])
    assert state.reals[4].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert state.reals[1].tolist() == [0.7, 0.9, 0.1, 1.1, 0.2, 0.3]
    assert state.wholes[[4, 1]].tolist() == [[0, 0, 0], [5, 5 - 2**63, 4]]
    assert state.known[[4, 1]].tolist() == [1, 3] and state.prompt[[4, 1]].tolist() == [1, 2]
    greedy, ask = rows.asks
    assert (ask.draws, ask.filters, ask.penalties, ask.logprobs) == (True, True, True, 2)
    assert (greedy.draws, greedy.filters, greedy.penalties, greedy.logprobs) == (False, False, False, None)
    assert ask.stops.tolist() == [8, 9] and greedy.stops.tolist() == []
    assert greedy.bias is None and [b.tolist() for b in ask.bias or ()] == [[3], [1.5]]
    assert rows.slots.tolist() == [4, 1] and t.early([4, 1]) == [1]
    t.grown([1, 1, 1])
    assert t.early([4, 1]) == []


def test_a_context_can_be_filled_to_its_last_token() -> None:
    t = table(max_len=8)
    t.apply(Batch(1, [], joins=[join(1, list(range(8)), [[1, 2], [1, 2]])]))
    t.append(t.slots([1], 3), torch.tensor([9, 7, 7]))
    assert t.state.tokens[1].tolist() == [*range(8), 9]


def test_large_vocabularies_cost_the_table_nothing() -> None:
    """256 slots of 4,096 tokens: penalties read the tokens, there are no counts by vocabulary."""
    t = Table(257, 4096, 16, 1, CPU)
    assert t.state.arena.nbytes < 8 * 2**20


def store(groups: list[Group] | None = None) -> Store:
    layers = [Heads(2, 3), Heads(1, 4), Heads(2, 3)]
    return Store(layers, [0, 1, 0], groups or [Group(6), Group(7)], 4, torch.float32, CPU)


def test_copies_move_pages_in_their_group_only() -> None:
    s = store()
    for i, group in enumerate(s.groups):
        group.copy_(torch.arange(group.numel()).reshape(group.shape) + 10_000 * i)
    before = [group.clone() for group in s.groups]
    s.copy([Copy(0, 2, 5, 3), Copy(0, 5, 4, 2)])  # the second reads what the first wrote
    assert torch.equal(s.groups[1], before[1])
    for layer in (0, 2):
        for now, place in zip(s.layer(layer), (0, 1), strict=True):
            old = before[0][place, s.places[layer][1]]
            assert torch.equal(now[5], old[2]) and torch.equal(now[4], old[2])
            assert torch.equal(now[:4], old[:4])


def test_the_stores_shapes() -> None:
    s = store()
    assert [t.shape for t in s.layer(0)] == [(6, 4, 2, 3)] * 2
    assert [t.shape for t in s.layer(1)] == [(7, 4, 1, 4)] * 2
    assert s.layer(0)[0].is_contiguous() and s.bytes == 4 * (2 * 2 * 6 * 4 * 6 + 2 * 7 * 4 * 4)
    s.layer(0)[0].fill_(1.0)
    s.layer(2)[0].fill_(2.0)
    assert s.layer(0)[0].eq(1).all()
    with pytest.raises(Unsupported, match="group 0"):
        Store([Heads(2, 3), Heads(1, 3)], [0, 0], [Group(4)], 4, torch.float32, CPU)


def test_the_sampler_writes_what_it_tells() -> None:
    """Rows that do not sample, logprobs where asked, masks by row, and a poisoned row."""
    t = table()
    want = Sampling(temperature=0.0, seed=0, logprobs=1)
    t.apply(
        Batch(
            1,
            [],
            joins=[join(s, [1, 2], [[s], [s]], sampling=want if s > 2 else GREEDY) for s in (1, 2, 3, 4)],
        )
    )
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [float("nan")] * 3])
    rows = [Row(1, 1, False), Row(3, 1, True), Row(2, 1, True), Row(4, 1, True)]
    result = Sampler(t, Reference()).sample(7, rows, logits, [[9], None, [0, 2], None]).result()
    assert result.step == 7 and result.tokens == [[], [1], [2], [0]]
    assert result.errors == [None, None, None, "no finite logit"]
    assert result.logprobs and [len(r) for r in result.logprobs] == [0, 1, 0, 0]
    assert result.logprobs[1][0].token == 1 and result.logprobs[1][0].rank == 1
    assert [t.state.known[s].item() for s in (1, 2, 3, 4)] == [2, 3, 3, 3]
    assert t.state.tokens[2, 2] == 2 and t.state.tokens[3, 2] == 1
    none = Sampler(t, Reference(), Cpu()).sample(8, rows[:1], torch.zeros(0, 3), None).result()
    assert none.tokens == [[]] and none.logprobs is None and none.errors is None


class Slow(Cpu):
    """A device that works behind the host's back: events come when they are let."""

    asynchronous = True

    def __init__(self) -> None:
        self.events: list[Slow.Event] = []

    class Event:
        def __init__(self) -> None:
            self.waited, self.ready = 0, False

        def record(self) -> None:
            self.ready = False

        def done(self) -> bool:
            return self.ready

        def wait(self) -> None:
            self.waited += 1
            self.ready = True

    def event(self) -> Event:
        self.events.append(Slow.Event())
        return self.events[-1]


def test_a_buffer_is_written_again_only_when_its_copy_is_done() -> None:
    platform = Slow()
    staging = Staging(CPU, platform)
    staging.direct = False
    for turn in range(3 * DEEP):
        assert [e.waited for e in platform.events] == [(turn - 1 - i) // DEEP for i in range(min(turn, DEEP))]
        assert staging.index([turn, 5]).tolist() == [turn, 5]
    assert len(platform.events) == DEEP
    before = staging.index([1, 2])
    large = staging.index(list(range(FIRST + 1)))
    assert large.tolist() == list(range(FIRST + 1)) and before.tolist() == [1, 2]


def test_reports_are_buffers_that_come_back() -> None:
    reports = Reports(CPU, Slow())
    reports.direct = False
    one, two = (reports.take(torch.tensor([[i, 2], [3, 4]], dtype=torch.int32)) for i in (0, 1))
    assert one.array().tolist() == [[0, 2], [3, 4]] and two.array().tolist() == [[1, 2], [3, 4]]
    reports.give(one)
    three = reports.take(torch.tensor([0.5]))
    assert three.buffer is one.buffer and three.array().tolist() == [0.5]
    assert two.array().tolist() == [[1, 2], [3, 4]]


def test_a_step_is_pending_until_its_event() -> None:
    t, platform = table(), Slow()
    t.apply(Batch(1, [], joins=[join(s, [1, 2], [[s], [s]]) for s in (1, 2)]))
    sampler = Sampler(t, Reference(), platform)
    rows = [Row(1, 1, True), Row(2, 1, True)]
    pendings = [sampler.sample(step, rows, torch.eye(2, 3), None) for step in range(2)]
    assert not pendings[0].done()
    pendings[0].end.ready = True
    assert pendings[0].done()
    assert pendings[1].result().tokens == [[0], [1]] and pendings[1].end.waited == 1
