"""Runs of pages in common: what the tree tells, when the device is told, and that a false one is noticed."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from tests.kit.engine import Kit, fake_kit
from tests.kit.fake import FakeExecutor
from tests.kit.shares import expected, same
from trine.cache.manager import Cache
from trine.cache.shares import SHORTEST
from trine.core.types import Batch, Group, Join, Request, Row, Sampling, Sequence, Share
from trine.registry import find

SIZE = 4


class House:
    """Sequences in slots that hold pages of a cache; `come` computes all tokens at once."""

    def __init__(self, shortest: int = 1, groups: list[Group] | None = None) -> None:
        self.cache = Cache(groups or [Group(400)], SIZE, shortest)
        self.live: list[Sequence] = []

    def come(self, tokens: list[int], space: str = "") -> Sequence:
        seq = Sequence(Request("x", tokens, space=space), array("i", tokens), slot=len(self.live) + 1)
        assert self.cache.admit(seq) is not None
        assert self.cache.extend(seq, len(tokens)) is not None
        seq.planned = seq.computed = len(tokens)
        self.cache.publish(seq)
        self.live.append(seq)
        return seq

    def go(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.cache.release(seq)

    def shares(self) -> list[Share]:
        self.cache.check(self.live)
        told = self.cache.shares(self.live)
        assert same(told, expected(self.live, 0, self.cache.shortest))
        return told


def words(start: int, pages: int) -> list[int]:
    return list(range(start, start + pages * SIZE))


def test_a_run_is_what_two_or_more_hold_and_ends_where_they_part() -> None:
    house = House()
    house.come(words(0, 5))
    assert house.shares() == []
    house.come(words(0, 3) + words(100, 4))
    assert house.shares() == [Share(0, 3, [1, 2])]
    house.come(words(0, 5) + [7])
    assert house.shares() == [Share(0, 3, [1, 2, 3]), Share(3, 2, [1, 3])]
    house.come(words(500, 5))
    house.come(words(0, 5), space="other")
    assert house.shares() == [Share(0, 3, [1, 2, 3]), Share(3, 2, [1, 3])]
    house.go(house.live[0])
    assert house.shares() == [Share(0, 3, [2, 3])]


def test_nodes_with_the_same_members_are_one_run() -> None:
    """The tree is cut where one that is gone left it; for attention that is no border."""
    house = House()
    for pages in (2, 5, 9):
        house.go(house.come(words(0, pages) + words(1000 * pages, 2)))
    first, second = house.come(words(0, 9)), house.come([*words(0, 9), 1])
    assert first.node.parent.parent is not None, "in several nodes"
    assert house.shares() == [Share(0, 9, [1, 2])]
    house.go(second)
    assert house.shares() == []


def test_too_short_a_run_is_read_with_what_goes_on_from_it() -> None:
    house = House(shortest=3 * SIZE)
    house.come(words(0, 2) + words(100, 3))
    house.come(words(0, 2) + words(200, 3))
    assert house.shares() == [], "two pages"
    house.come(words(0, 2) + words(100, 5))
    assert house.shares() == [Share(0, 5, [1, 3])], "and not by slot 2"
    house.come(words(0, 2) + words(200, 5))
    assert house.shares() == [Share(0, 5, [1, 3]), Share(0, 5, [2, 4])]
    house.come(words(0, 2) + words(100, 5) + words(300, 1))
    assert house.shares() == [Share(0, 5, [1, 3, 5]), Share(0, 5, [2, 4])], "two pages more, of 3 and 5"


def test_a_run_of_some_tokens_is_in_whole_pages() -> None:
    assert SHORTEST == 64
    assert Cache([Group(9)], 16).shortest == 4
    assert Cache([Group(9)], 48).shortest == 2


@pytest.mark.parametrize(("windows", "told"), [([8], False), ([0, 8], True), ([8, 0], True)])
def test_only_groups_that_keep_all_share(windows: list[int], told: bool) -> None:
    house = House(groups=[Group(400, w) for w in windows])
    house.come(words(0, 5))
    house.come([*words(0, 5), 1])
    assert house.cache.shares(house.live) == ([Share(0, 5, [1, 2])] if told else [])


@pytest.mark.parametrize("seed", range(20))
def test_they_are_those_of_the_page_tables(seed: int) -> None:
    """Whoever comes and goes; and `bonds` grows whenever they change."""
    rng = random.Random(seed)
    house = House(shortest=rng.choice([1, 1, 6, 16]))
    told, bonds = [], house.cache.bonds
    for _ in range(60):
        if house.live and rng.random() < 0.4:
            house.go(rng.choice(house.live))
        else:
            tokens = [token for _ in range(rng.randint(1, 6)) for token in words(rng.randrange(3) * 100, 1)]
            free = next(n for n in range(1, 99) if all(seq.slot != n for seq in house.live))
            house.come(tokens + [9] * rng.randint(1, 3)).slot = free
        now = house.shares()
        assert now == told or house.cache.bonds != bonds
        told, bonds = now, house.cache.bonds


def start(kit: Kit, tails: list[int], stem: int = 32, **sampling: Any) -> None:
    values = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True} | sampling
    for index, tail in enumerate(tails):
        tokens = [*range(stem), *range(40, 40 + tail)]
        kit.engine.add(Request(f"r{index}", tokens, Sampling(seed=index, **values)))


def watched(kit: Kit) -> list[list[Share] | None]:
    """What each batch says of shares, from now on."""
    said: list[list[Share] | None] = []
    watch = kit.device.watch
    kit.device.watch = lambda batch: (watch(batch), said.append(batch.shares))[0]
    return said


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_device_is_told_when_they_change_and_not_before(depth: int) -> None:
    kit = fake_kit(page_size=4, max_len=100, depth=depth, lazy=True, budget=64)
    said = watched(kit)
    start(kit, [1, 2, 3])
    for _ in range(12):
        kit.engine.step()
    slots = sorted(seq.slot for seq in kit.scheduler.running)
    assert [x for x in said if x is not None][-1] == [Share(0, 8, slots)]
    said.clear()
    for _ in range(6):
        kit.engine.step()
    assert said == [None] * 6, "nothing in a step that goes on"
    gone = kit.scheduler.running[0].slot
    kit.engine.abort("r0")
    kit.engine.step()
    assert said[6:] == [[Share(0, 8, [s for s in slots if s != gone])]]
    kit.engine.abort("r1")
    kit.engine.step()
    assert said[7:] == [[]]
    while kit.engine.busy:
        kit.engine.step()
    assert set(map(str, said[8:])) <= {"None"}


def test_a_slot_that_has_a_new_tenant_with_the_same_pages_is_not_news() -> None:
    kit = fake_kit(page_size=4, max_len=100, slots=2, budget=64)
    said = watched(kit)
    start(kit, [1, 2, 3], max_tokens=9)
    kit.engine.step()
    kit.engine.step()
    assert said[-1] == [Share(0, 8, [1, 2])]
    while kit.engine.busy:
        kit.engine.step()
    assert [x for x in said[2:] if x is not None] == [[]], "two, then the third with one of them, then alone"


def test_corrections_come_with_the_run_that_they_make() -> None:
    """Two that compute the same page: the second gets the page of the first, and has a run with it."""
    house = House()
    tokens = words(0, 2)
    one, two = (Sequence(Request("x", tokens[:n]), array("i", tokens[:n]), slot=n) for n in (6, 7))
    for seq in (one, two):
        assert house.cache.admit(seq) == []
        house.live.append(seq)
        if seq is one:
            house.cache._unmake(seq)  # else the second would wait
        house.cache.extend(seq, 8)
    for seq in (one, two):
        seq.tokens = array("i", tokens)
        seq.planned = seq.computed = 8
    assert house.cache.publish(one) == [] and house.shares() == []
    bonds, page = house.cache.bonds, one.pages[0]
    assert house.cache.publish(two) == [(0, 0, page)]
    assert house.cache.bonds > bonds and house.shares() == [Share(0, 2, [6, 7])]


@pytest.mark.parametrize("policy", sorted(find("scheduler.policies")))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_they_hold_while_sequences_are_preempted_and_aborted(policy: str, depth: int) -> None:
    """The device checks each step, and reads through another member's table."""
    kit = fake_kit(
        page_size=4, max_len=80, depth=depth, policy=policy, groups=[Group(42), Group(42, 9)], lazy=True
    )
    rng = random.Random(depth)
    for index in range(30):
        tokens = list(range(rng.choice([0, 10, 16, 17]))) + [rng.randrange(50) for _ in range(3)]
        sampling = Sampling(seed=index % 3, max_tokens=rng.randint(5, 40), ignore_eos=True)
        kit.engine.add(Request(f"r{index}", tokens, sampling, priority=rng.randrange(3)))
    while kit.engine.busy:
        kit.engine.step()
        kit.cache.check(kit.scheduler.running)
        if rng.random() < 0.05 and kit.scheduler.live:
            kit.engine.abort(rng.choice(sorted(kit.scheduler.live)))
    seen = kit.device.seen
    assert seen["rows that share"] > 50 and seen["shares"] > 5
    assert kit.engine.stats().preemptions > 0


def join(slot: int, pages: list[int], computed: int = 0, tokens: int = 9) -> Join:
    ids = array("i", range(tokens)).tobytes()
    return Join(slot, ids, tokens, [pages], computed, Sampling(temperature=0.0, seed=0))


def device() -> FakeExecutor:
    """Slot 1 has computed 9 tokens in pages 1 to 3; slot 2 joins on the first two of them."""
    fake = FakeExecutor([Group(20)], SIZE, 4, 40)
    batch = Batch(1, [Row(1, 9, True)], [join(1, [1, 2, 3])])
    fake.forward(batch)
    fake.sample(batch, None)
    return fake


def share(fake: FakeExecutor, shares: list[Share], joins: list[Join] | None = None) -> None:
    joins = [join(2, [1, 2, 4], 8)] if joins is None else joins
    fake.forward(Batch(2, [Row(1, 1, True)], joins, shares=shares))


def test_a_true_run_is_read_through_another_table() -> None:
    fake = device()
    share(fake, [Share(0, 2, [1, 2])])
    assert fake.seen["rows that share"] == 1
    fake.places[2].pages[0][0] = 3  # never looked at by itself, and wrong now
    with pytest.raises(AssertionError, match="other pages"):
        fake.forward(Batch(3, [Row(2, 1, True)]))


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        ([Share(0, 0, [1, 2])], "an empty run"),
        ([Share(0, 1, [1])], "no two slots"),
        ([Share(0, 1, [1, 1])], "one twice"),
        ([Share(0, 1, [1, 3])], "no tenant"),
        ([Share(0, 3, [1, 2])], "not computed all"),
        ([Share(1, 1, [1, 2])], "begins at page 1"),
        ([Share(0, 1, [1, 2]), Share(0, 2, [1, 2])], "after"),
        ([Share(0, 1, [1, 2]), Share(1, 1, [1, 2])], "is not below"),
        ([], "told again"),
    ],
)
def test_a_false_run_is_noticed(shares: list[Share], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        share(device(), shares)


def test_pages_that_differ_or_lost_their_kv_are_noticed() -> None:
    with pytest.raises(AssertionError, match="other pages"):
        share(device(), [Share(0, 2, [1, 2])], [join(2, [1, 5, 4], 8)])
    fake = device()
    fake.poison(0, [2])
    with pytest.raises(AssertionError, match="not its KV"):
        share(fake, [Share(0, 2, [1, 2])])
