"""Prompts beside rows of one token: how much of them rides in a step. Tokens and work are counted, no clock."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from trine.cache.manager import Cache
from trine.core.types import Batch, Group, Request, Result, Sampling, Sequence
from trine.registry import find
from trine.scheduler.mix import Mix
from trine.scheduler.scheduler import Scheduler

RIDGE, REACH, BUDGET, PAGE = 160, 3.3e-5, 8192, 16
MIX = Mix(RIDGE, REACH)


class Desk:
    """A scheduler whose steps are committed `depth` - 1 steps later; keeps what prompts added to each."""

    def __init__(self, mix: Mix | None = MIX, depth: int = 1, policy: str = "fcfs", **options: int) -> None:
        values = {"slots": 320, "budget": BUDGET, "max_len": 140_000} | options
        self.cache = Cache([Group(60_000)], PAGE)
        plugin = find("scheduler.policies")[policy]
        self.scheduler = Scheduler(self.cache, policy=plugin(), mix=mix, **values)
        self.depth, self.number, self.begun = depth, 0, set[Sequence]()
        self.flights: list[tuple[Batch, list[Sequence], list[int]]] = []

    def ask(self, length: int, most: int = 3000, priority: int = 0) -> Sequence:
        """A prompt that nobody shares anything with."""
        self.number += 1
        tokens = array("i", range(self.number * 200_000, self.number * 200_000 + length)).tolist()
        sampling = Sampling(max_tokens=most)
        return self.scheduler.add(Request(str(self.number), tokens, sampling, priority=priority))

    def step(self) -> tuple[int, int, float]:
        """Rows of one token, tokens of prompts, and their work."""
        starts = {seq: seq.planned for seq in self.scheduler.running}
        planned = self.scheduler.schedule()
        assert planned
        batch, seqs = planned
        self.flights.append((batch, seqs, [seq.life for seq in seqs]))
        ones, tokens, work = 0, 0, 0.0
        for row, seq in zip(batch.rows, seqs, strict=True):
            if seq in self.begun:
                assert row.count == 1
                ones += 1
                continue
            tokens += row.count
            work += MIX.cost(starts.get(seq, 0), row.count)
            if row.sample:
                self.begun.add(seq)
        assert ones + tokens <= self.scheduler.budget
        if len(self.flights) == self.depth:
            self.land()
        return ones, tokens, work

    def land(self) -> None:
        batch, seqs, lives = self.flights.pop(0)
        tokens = [[5] if row.sample else [] for row in batch.rows]
        self.scheduler.commit(batch.rows, seqs, lives, Result(batch.step, tokens))

    def rows(self, count: int) -> None:
        """So many that have their first token."""
        for _ in range(count):
            self.ask(8)
        while self.scheduler.waiting or self.scheduler.opening:
            self.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_makes_no_step_longer_than_two_plain_ones(depth: int) -> None:
    desk = Desk(depth=depth)
    desk.rows(32)
    seq = desk.ask(131_072)
    steps = 0
    while seq not in desk.begun:
        ones, tokens, work = desk.step()
        assert ones == 32, "nobody waits for the prompt"
        assert work <= RIDGE or tokens == MIX.least
        assert tokens >= MIX.least or seq in desk.begun
        steps += 1
    assert steps == pytest.approx(MIX.cost(0, 131_072) / RIDGE, rel=0.05), "and it takes all it may"
    assert desk.step()[:2] == (32 + 1, 0)


def test_without_the_rule_it_takes_the_whole_budget() -> None:
    """So the test above can fail."""
    desk = Desk(mix=None)
    desk.rows(32)
    desk.ask(131_072)
    assert desk.step()[:2] == (32, BUDGET - 32)


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    desk = Desk()
    desk.ask(20_000)
    assert [desk.step()[1] for _ in range(3)] == [BUDGET, BUDGET, 20_000 - 2 * BUDGET]


@pytest.mark.parametrize("waiting", [1, 2, 8, 256])
def test_each_prompt_that_waits_adds_one_plain_step_until_the_budget_is_full(waiting: int) -> None:
    desk = Desk()
    desk.rows(32)
    for _ in range(waiting):
        desk.ask(1024)
    ones, tokens, work = desk.step()
    assert ones == 32
    if waiting == 256:
        assert ones + tokens == BUDGET
    else:
        assert waiting * RIDGE - MIX.least <= work <= waiting * RIDGE


def test_the_first_prompt_is_finished_first() -> None:
    desk = Desk()
    desk.rows(4)
    seqs = [desk.ask(400) for _ in range(3)]
    ends: list[int] = []
    for number in range(20):
        desk.step()
        ends += [number for seq in seqs if seq in desk.begun and len(ends) <= seqs.index(seq)]
    assert ends == sorted(ends) and len(ends) == 3
    assert ends[0] == 0, "all three pay for the first"


def test_only_prompts_that_can_get_a_slot_count() -> None:
    desk = Desk(slots=33)
    desk.rows(32)
    for _ in range(50):
        desk.ask(1024)
    work = [desk.step()[2] for _ in range(4)]
    assert all(each <= RIDGE for each in work)


def test_rows_of_one_token_have_their_place_in_a_small_budget() -> None:
    desk = Desk(budget=48)
    desk.rows(20)
    for _ in range(40):
        desk.ask(300)
    for _ in range(10):
        ones, tokens, _ = desk.step()
        assert ones >= 20 and ones + tokens == 48


def test_there_is_always_progress() -> None:
    """Also where one token costs more than a plain step, or the budget is less than the rows ask for."""
    desk = Desk(mix=Mix(1, 1.0, least=16), budget=24)
    desk.rows(20)
    older, younger = desk.ask(50), desk.ask(50)
    ends = [number for number in range(40) if desk.step() and {older, younger} <= desk.begun]
    assert ends[0] < -(-50 // 4) + -(-50 // 3), "the rows leave four tokens a step, and then three"
    assert older in desk.begun


def test_what_is_left_of_a_prompt_may_be_less_than_the_least() -> None:
    desk = Desk(mix=Mix(20, 0.0, least=16))
    desk.rows(2)
    seq = desk.ask(41)
    assert [desk.step()[1] for _ in range(3)] == [20, 20, 1]
    assert seq in desk.begun


def test_who_gets_nothing_of_this_step_is_asked_again_in_the_next() -> None:
    """To be put off is not to be too big: only that is remembered until pages are free."""
    desk = Desk(mix=Mix(40, 0.5, least=4))
    desk.rows(2)
    seqs = [desk.ask(30) for _ in range(6)]
    left = [sum(seq not in desk.begun for seq in seqs)]
    while left[-1]:
        desk.step()
        left.append(sum(seq not in desk.begun for seq in seqs))
        assert len(left) < 100
    assert all(b <= a for a, b in pairwise(left))


@pytest.mark.parametrize("policy", sorted(find("scheduler.policies")))
def test_nothing_is_counted_of_one_that_left_early(policy: str) -> None:
    desk = Desk(policy=policy)
    desk.rows(3)
    seq = desk.ask(5000)
    desk.step()
    assert desk.scheduler.opening == {seq}
    desk.scheduler.abort(seq.request.id)
    assert not desk.scheduler.opening
    assert desk.step()[:2] == (3, 0)


@pytest.mark.parametrize("start", [0, 100, 131_000])
@pytest.mark.parametrize("reach", [0.0, 3.3e-5, 0.01])
@pytest.mark.parametrize("work", [0.0, 1.0, 160.0, 40_000.0])
def test_the_longest_chunk_is_just_not_too_much(start: int, reach: float, work: float) -> None:
    mix = Mix(160, reach)
    count = mix.chunk(work, start)
    assert mix.cost(start, count) <= work * (1 + 1e-9)
    assert mix.cost(start, count + 1) > work * (1 - 1e-9)
