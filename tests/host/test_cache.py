"""The cache's door: admit, extend, publish, slide, release, each followed by the check from first
principles."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.cache.manager import Cache
from trine.cache.tree import TAILS
from trine.core.types import Copy, Group, Request, Sequence

SIZE = 4


class House:
    """A cache and the sequences that live in it; `compute` stands for a device."""

    def __init__(self, *groups: Group, size: int = SIZE) -> None:
        self.cache = Cache(list(groups), size)
        self.live: list[Sequence] = []

    def come(self, tokens: list[int], space: str = "") -> tuple[Sequence, list[Copy] | None]:
        seq = Sequence(Request("x", tokens, space=space), array("i", tokens))
        copies = self.cache.admit(seq)
        self.live.append(seq)
        self.check()
        return seq, copies

    def compute(self, seq: Sequence, length: int | None = None) -> list[tuple[int, int, list[int]]]:
        """Up to `length` tokens get KV and are published; what to correct."""
        length = len(seq.tokens) if length is None else length
        assert self.cache.extend(seq, length) is not None
        seq.planned = seq.computed = length
        changes = self.cache.publish(seq) + self.cache.slide(seq)
        self.check()
        return changes

    def go(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.cache.release(seq)
        self.check()

    def stay(self, tokens: list[int], space: str = "") -> list[int]:
        """A sequence comes, computes all, and goes; the pages of group 0 that it had."""
        seq, _ = self.come(tokens, space)
        self.compute(seq)
        pages = seq.pages[0][:]
        self.go(seq)
        return pages

    def check(self) -> None:
        self.cache.check(self.live)


def test_a_match_is_to_the_token_and_its_page_is_copied() -> None:
    house = House(Group(20))
    pages = house.stay([1, 2, 3, 4, 5, 6, 7, 8])
    seq, copies = house.come([1, 2, 3, 4, 5, 6, 9, 9, 9])
    assert (seq.computed, seq.planned, seq.shared) == (6, 6, 1)
    assert copies == [Copy(0, pages[1], seq.pages[0][1], 2)]
    assert seq.pages[0][0] == pages[0]
    assert seq.pages[0][1] not in pages


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_wholly_cached_prompt_leaves_one_token(length: int) -> None:
    house = House(Group(20))
    house.stay(list(range(12)))
    seq, _ = house.come(list(range(length)))
    assert seq.computed == length - 1


def test_the_best_neighbour_is_copied_from() -> None:
    house = House(Group(40))
    for last in ([7, 1, 1, 1], [7, 8, 1, 1], [7, 8, 9, 1], [9, 9, 9, 9]):
        house.stay([1, 2, 3, 4, *last])
    seq, copies = house.come([1, 2, 3, 4, 7, 8, 9, 2, 2])
    assert seq.computed == 7 and copies and copies[0].tokens == 3


def test_a_source_that_is_the_last_page_to_be_had_is_not_copied() -> None:
    """Its only room would be the source itself, which must outlive the copy."""
    house = House(Group(1 + 3))
    house.stay(list(range(8)))
    other, _ = house.come([50, 51, 52])
    house.compute(other)
    seq, copies = house.come([0, 1, 2, 3, 4, 5, 9, 9])
    assert copies == [] and seq.computed == 4
    assert house.cache.extend(seq, 8) is not None, "and yet it fits"
    house.check()


def tails(house: House) -> list[list[int]]:
    return sorted(array("i", tail.key).tolist() for n in house.cache.tree.nodes() for tail in n.tails)


def test_the_last_page_is_kept_though_it_is_not_full() -> None:
    house = House(Group(20), Group(20, window=6))
    pages = house.stay([1, 2, 3, 4, 5, 6, 7])
    assert tails(house) == [[5, 6, 7]]
    assert [pool.idle for pool in house.cache.pools] == [2, 2]
    seq, copies = house.come([1, 2, 3, 4, 5, 6, 9])
    assert seq.computed == 6
    assert copies and copies[0] == Copy(0, pages[1], seq.pages[0][1], 2)
    assert len(copies) == 2, "one in each group"


def test_a_tail_gives_way_to_what_has_all_its_tokens() -> None:
    house = House(Group(20))
    for tokens, left in (
        ([5, 6], [[5, 6]]),
        ([5], [[5, 6]]),
        ([5, 6], [[5, 6]]),
        ([5, 7], [[5, 6], [5, 7]]),
        ([5, 6, 7], [[5, 6, 7], [5, 7]]),
        ([5, 6, 7, 8], [[5, 7]]),
        ([5, 6, 7], [[5, 7]]),
        ([5, 7, 1, 1], []),
    ):
        house.stay(tokens)
        assert tails(house) == left
    assert house.cache.pools[0].idle == 2


def test_a_page_that_fills_up_replaces_its_tail_before_its_sequence_goes() -> None:
    house = House(Group(20))
    house.stay([1, 2, 3, 4, 5, 6])
    seq, _ = house.come([1, 2, 3, 4, 5, 6, 7, 8])
    house.compute(seq)
    assert tails(house) == []
    assert house.cache.tree.size == 1, "its leaf just grew"


def test_only_what_is_certain_is_kept() -> None:
    house = House(Group(20))
    seq, _ = house.come([1, 2, 3])
    house.cache.extend(seq, 3)
    seq.planned, seq.computed = 3, 2
    house.go(seq)
    assert tails(house) == [[1, 2]]


def test_the_oldest_tail_goes_when_a_node_has_too_many() -> None:
    house = House(Group(40))
    for number in range(TAILS):
        house.stay([number, 1])
    house.stay([0, 1])  # used again
    house.stay([99])
    assert tails(house) == [[0, 1], *([n, 1] for n in range(2, TAILS)), [99]]


def test_tails_are_evicted_by_their_last_use() -> None:
    house = House(Group(1 + 5))
    house.stay([1, 2])
    house.stay([3, 3, 3, 3, 3])
    house.stay([4, 4])
    house.go(house.come([1, 2, 9])[0])  # the first is the newest now
    assert tails(house) == [[1, 2], [3], [4, 4]]
    for left in ([[1, 2], [3], [4, 4]], [[1, 2], [4, 4]], [[1, 2], [4, 4]], [[1, 2]], []):
        new, _ = house.come([7] * 1)
        house.cache.extend(new, 1)
        assert tails(house) == left


def test_spaces_share_nothing() -> None:
    house = House(Group(40))
    house.stay(list(range(8)), "a")
    assert house.come(list(range(8)), "b")[0].computed == 0
    assert house.come(list(range(8)), "a")[0].computed == 7


def test_extend_takes_all_or_nothing() -> None:
    house = House(Group(1 + 4), Group(1 + 2))
    seq, _ = house.come([1] * 20)
    assert house.cache.extend(seq, 9) is None
    house.check()
    assert house.cache.fit(seq, 20) == 8
    assert house.cache.extend(seq, 8) == [(0, 0, seq.pages[0]), (1, 0, seq.pages[1])]
    assert house.cache.extend(seq, 5) == []


def test_whoever_publishes_second_gets_the_pages_of_the_first() -> None:
    house = House(Group(40))
    first, _ = house.come(list(range(9)))
    assert house.cache.extend(first, 9)
    house.cache.maker.clear()
    house.cache.making.clear()  # so that the second does not wait
    second, _ = house.come(list(range(11)))
    assert second.computed == 0
    assert house.compute(first) == []
    free = len(house.cache.pools[0].free)
    changes = house.compute(second)
    assert changes == [(0, 0, first.pages[0][:2])]
    assert second.pages[0][:2] == first.pages[0][:2]
    assert len(house.cache.pools[0].free) == free - 3 + 2, "three taken, the two duplicates given back"


def test_a_sibling_waits_while_its_next_page_is_computed() -> None:
    house = House(Group(40))
    first, _ = house.come(list(range(12)))
    seq, copies = house.come([*range(8), 50, 51, 52, 53])
    assert copies is None and seq.node is None
    stranger, copies = house.come([0, 1, 2, 9, 9, 9])
    assert copies == [], "its first page is another one"
    house.compute(first, 4)
    assert house.cache.admit(seq) is None, "the second page is still to come"
    house.compute(first, 8)
    assert house.cache.admit(seq) == [], "here they part"
    assert seq.computed == 8
    house.check()
    for living in (first, stranger, seq):
        house.go(living)


def test_nobody_waits_for_one_that_is_gone() -> None:
    house = House(Group(40))
    first, _ = house.come(list(range(12)))
    seq, copies = house.come(list(range(12)))
    assert copies is None
    house.compute(first, 5)
    house.go(first)
    assert house.cache.admit(seq) is not None
    assert seq.computed == 5
    assert house.cache.blocked == {}


def test_nobody_waits_across_spaces() -> None:
    house = House(Group(40))
    house.come(list(range(12)), "a")
    assert house.come(list(range(12)), "b")[1] == []


def test_a_window_group_keeps_only_its_window() -> None:
    house = House(Group(40), Group(40, window=6))
    seq, _ = house.come(list(range(30)))
    changes = house.compute(seq, 21)
    assert changes == [(1, 0, [0, 0, 0])], "pages 3 and 4, and the open one, stay"
    assert [bool(p) for p in seq.pages[1]] == [False] * 3 + [True] * 3
    assert house.cache.pools[1].idle == 3, "they were published before: the tree may keep them"
    assert house.cache.extend(seq, 30)
    seq.planned = seq.computed = 30
    assert house.cache.slide(seq) == [(1, 3, [0, 0])]
    house.go(seq)
    assert house.come(list(range(31)))[0].computed == 30, "the end is served, with its window"


def test_a_match_ends_where_every_group_can_serve_it() -> None:
    house = House(Group(40), Group(1 + 5, window=4))
    seq, _ = house.come(list(range(29)))
    for length in range(4, 29, 4):
        house.compute(seq, length)
    house.go(seq)
    other, _ = house.come([77] * 16)
    house.compute(other, 12)  # takes the window pages of the inner nodes
    assert house.come(list(range(29)))[0].computed == 28
    other, _ = house.come([*range(12), 5, 5, 5])
    assert other.computed == 0, "the window in the middle is gone"


def test_a_lost_window_page_is_healed_by_who_computes_it_again() -> None:
    house = House(Group(40), Group(40, window=4))
    tokens = list(range(17))
    house.stay(tokens[:16])
    for node in house.cache.tree.nodes():
        pool = house.cache.pools[1]
        pool.free += [p for p in node.pages[1] if p]
        pool.idle -= sum(p > 0 for p in node.pages[1])
        node.pages[1] = [0] * node.count
    house.check()
    seq, _ = house.come(tokens)
    assert seq.computed == 0
    changes = house.compute(seq)
    assert [c[:2] for c in changes] == [(0, 0), (1, 0)], "full pages are the tree's; then the window slid"
    house.go(seq)
    assert house.come(tokens)[0].computed == 16


def test_the_view_counts_each_page_once() -> None:
    house = House(Group(21))
    first, _ = house.come(list(range(10)))
    house.compute(first)
    second, _ = house.come(list(range(10)))
    house.cache.extend(second, 9)
    second.planned = 9
    view = house.cache.view(house.live)
    assert (view.pages, view.held, view.cached) == (20, 4, 0)
    assert (view.reserved, view.used) == (16, 10 + 1), "8 shared, and 2 and 1 of the open pages"
    house.go(second)
    house.go(first)
    assert house.cache.view([])[1:4] == (0, 3, 0), "the open page is kept too"
    house.cache.flush()
    assert house.cache.view([])[1:4] == (0, 0, 0)


def test_a_peek_changes_nothing() -> None:
    house = House(Group(40))
    house.stay(list(range(12)))
    nodes, clock = house.cache.tree.size, house.cache.tree.clock
    seq = Sequence(Request("x", [0, 1, 2, 3, 9]), array("i", [0, 1, 2, 3, 9]))
    assert house.cache.peek(seq) == 4
    assert house.cache.peek(Sequence(Request("x", [1], space="new"), array("i", [1]))) == 0
    assert (house.cache.tree.size, house.cache.tree.clock) == (nodes, clock)
    assert list(house.cache.tree.roots) == [""]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9))
def test_any_order_of_the_verbs_keeps_every_page_in_one_place(seed: int) -> None:
    rng = random.Random(seed)
    size, windows = rng.choice([1, 2, 3]), rng.choice([[0], [0], [0, 3], [2], [0, 0, 5], [4, 1]])
    house = House(*(Group(1 + rng.randint(8, 30), w) for w in windows), size=size)
    for _ in range(60):
        if len(house.live) < 5 and rng.random() < 0.4:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            seq, copies = house.come(tokens, str(rng.randrange(2)))
            if copies is None:
                house.live.remove(seq)
                house.cache.release(seq)
        elif house.live and rng.random() < 0.3:
            house.go(rng.choice(house.live))
        elif house.live:
            seq = rng.choice(house.live)
            if seq.computed + 1 >= len(seq.tokens):
                seq.tokens.append(rng.randrange(2))
            length = house.cache.fit(seq, rng.randint(seq.computed, len(seq.tokens)))
            if length > seq.computed:
                house.compute(seq, length)
        elif rng.random() < 0.1:
            house.cache.flush()
            house.check()
    for seq in house.live[:]:
        house.go(seq)
    house.cache.flush()
    house.check()
    assert all(len(pool.free) == pool.total for pool in house.cache.pools)
