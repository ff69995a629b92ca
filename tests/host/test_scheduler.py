"""Who runs: budget, order, room, preemption, ends. The device is a line that answers with numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from trine.cache.manager import Cache
from trine.core.types import Batch, Grant, Group, Logprob, Output, Request, Result, Sampling, Sequence, Status
from trine.errors import RequestError
from trine.registry import find
from trine.scheduler.policies.fcfs import Fcfs
from trine.scheduler.policies.prefix import PATIENCE, Prefix
from trine.scheduler.policies.priority import Priority
from trine.scheduler.scheduler import Scheduler
from trine.scheduler.work import Work

SIZE = 4


class Desk:
    """A scheduler, and steps that are committed at once, or later."""

    def __init__(
        self, pages: int = 50, windows: tuple[int, ...] = (0,), policy: str = "fcfs", **options: object
    ) -> None:
        values = {"slots": 4, "budget": 16, "max_len": 100} | options
        self.cache = Cache([Group(1 + pages, w) for w in windows], SIZE)
        self.scheduler = Scheduler(self.cache, policy=find("scheduler.policies")[policy](), **values)  # type: ignore[arg-type]
        self.flights: list[tuple[Batch, list[Sequence], list[int]]] = []
        self.answer: Callable[[Sequence], int] = lambda seq: 1000 + len(seq.tokens)
        self.number = 0

    def ask(
        self,
        tokens: list[int],
        id: str | None = None,
        emitted: int = 0,
        priority: int = 0,
        **sampling: object,
    ) -> Sequence:
        self.number += 1
        values = {"max_tokens": 4} | sampling
        request = Request(
            id or f"r{self.number}",
            tokens,
            Sampling(**values),
            emitted,
            priority=priority,  # type: ignore[arg-type]
        )
        return self.scheduler.add(request)

    def launch(self) -> Batch | None:
        planned = self.scheduler.schedule()
        if planned:
            batch, seqs = planned
            self.flights.append((batch, seqs, [seq.life for seq in seqs]))
            assert sum(row.count for row in batch.rows) <= self.scheduler.budget
            self.cache.check(self.scheduler.running)
            return batch
        return None

    def land(self, tokens: list[list[int]] | None = None, logprobs: object = None) -> list[Output]:
        batch, seqs, lives = self.flights.pop(0)
        if tokens is None:
            tokens = [[self.answer(s)] if r.sample else [] for r, s in zip(batch.rows, seqs, strict=True)]
        outputs = self.scheduler.commit(batch.rows, seqs, lives, Result(batch.step, tokens, logprobs))  # type: ignore[arg-type]
        self.cache.check(self.scheduler.running)
        return outputs

    def step(self) -> list[Output]:
        return self.land() if self.launch() else []

    def drain(self, most: int = 2000) -> list[Output]:
        outputs: list[Output] = []
        while self.scheduler.live:
            outputs += self.step()
            most -= 1
            assert most, "no end"
        return outputs


def words(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_run() -> None:
    desk = Desk(budget=10)
    first = desk.ask(words(0, 3))
    desk.step()
    second = desk.ask(words(100, 25))
    rows = []
    for _ in range(3):
        batch = desk.launch()
        assert batch is not None
        rows.append([(r.slot, r.count, r.sample) for r in batch.rows])
        desk.land()
    one, two = first.slot, second.slot
    assert (
        rows
        == [
            [(one, 1, True), (two, 9, False)],
            [(one, 1, True), (two, 9, False)],
            [(one, 1, True), (two, 7, True)],
        ]
        or first.status is Status.FINISHED
    )
    assert second.tokens[-1] == 1025


def test_the_budget_goes_to_the_older_first() -> None:
    desk = Desk(budget=2, slots=3)
    seqs = [desk.ask([i]) for i in range(3)]
    desk.step()
    assert [s.status for s in seqs] == [Status.RUNNING, Status.RUNNING, Status.WAITING]


def test_a_step_ahead_its_token_is_promised() -> None:
    desk = Desk()
    seq = desk.ask([1, 2, 3], max_tokens=2)
    desk.launch()
    batch = desk.launch()
    assert batch is not None and [(r.count, r.sample) for r in batch.rows] == [(1, True)]
    assert (seq.promised, seq.planned, seq.computed) == (2, 4, 0)
    assert desk.launch() is None, "two tokens are all it may have"
    assert [o.finished for o in desk.land() + desk.land()] == [None, "length"]


def test_stop_and_length() -> None:
    desk = Desk(max_len=12)
    desk.answer = lambda seq: 7
    desk.ask([1], "a", stop_ids=(7,))
    desk.ask([2], "b", max_tokens=3)
    desk.ask(words(50, 10), "c", max_tokens=50)
    last = {o.id: o for o in desk.drain() if o.finished}
    assert {id: o.finished for id, o in last.items()} == {"a": "stop", "b": "length", "c": "length"}
    assert {id: o.usage.output for id, o in last.items() if o.usage} == {"a": 1, "b": 3, "c": 2}
    assert sorted(desk.scheduler.slots) == [1, 2, 3, 4]


def test_late_results_of_a_finished_or_aborted_one_are_dropped() -> None:
    desk = Desk()
    desk.answer = lambda seq: 7
    desk.ask([1, 2], "a", stop_ids=(7,))
    desk.ask([3, 4], "b")
    desk.launch()
    desk.launch()
    assert [(o.id, o.finished) for o in desk.land()] == [("a", "stop"), ("b", None)]
    output = desk.scheduler.abort("b")
    assert output and output.finished == "abort" and output.usage and output.usage.output == 1
    assert desk.scheduler.abort("b") is None
    assert desk.land() == []
    assert desk.scheduler.live == {} and desk.scheduler.running == []
    assert desk.scheduler.stats().held == 0


def test_an_id_can_be_used_again_but_not_twice_at_once() -> None:
    desk = Desk()
    desk.ask([1], "a")
    with pytest.raises(RequestError, match="'a' is alive"):
        desk.ask([1], "a")
    desk.launch()
    desk.scheduler.abort("a")
    desk.ask([5, 6, 7], "a", max_tokens=1)
    assert desk.land() == []
    assert [o.id for o in desk.drain()] == ["a"]


@pytest.mark.parametrize(
    ("tokens", "sampling", "match"),
    [
        (100, {}, r"prompt has 100 tokens, and the context holds 100.* 1 too long"),
        (60, {"max_tokens": 30}, r"needs 23 pages of 4 tokens, and there are 20"),
    ],
)
def test_what_can_never_run_is_refused_with_numbers(
    tokens: int, sampling: dict[str, int], match: str
) -> None:
    desk = Desk(pages=20)
    with pytest.raises(RequestError, match=match):
        desk.ask(words(0, tokens), **sampling)
    assert desk.scheduler.live == {}


@pytest.mark.parametrize("capacity", ["max-use", "no-evict"])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,), (6, 3)])
def test_what_just_fits_the_empty_pool_runs(capacity: str, windows: tuple[int, ...]) -> None:
    pages = 20 if 0 in windows else 3
    desk = Desk(pages=pages, windows=windows, capacity=capacity, budget=7)
    desk.ask(words(0, 41), max_tokens=40)  # 81 tokens, the last without KV: 20 pages
    assert desk.drain()[-1].finished == "length"
    assert desk.scheduler.counts.preemptions == 0


def test_the_youngest_makes_room_and_comes_back() -> None:
    desk = Desk(pages=8, budget=64)
    old, young = (desk.ask(words(100 * i, 11), max_tokens=12) for i in range(2))
    desk.step()
    while not desk.scheduler.counts.preemptions:
        desk.step()
    assert (old.life, young.life) == (0, 1)
    assert young.status is Status.WAITING and young.pages == [] and young.slot == -1
    last = {o.id: o for o in desk.drain() if o.finished}
    assert all(o.finished == "length" and o.usage and o.usage.output == 12 for o in last.values())
    usage = last["r2"].usage
    assert usage and usage.preemptions == young.life and usage.cached == 0, "cached: of the first admission"


def test_tokens_in_flight_of_a_preempted_one_still_count() -> None:
    desk = Desk(pages=8, budget=64)
    old, young = (desk.ask(words(100 * i, 10), max_tokens=10) for i in range(2))
    desk.launch()
    while not desk.scheduler.counts.preemptions:
        desk.launch()
        if not desk.scheduler.counts.preemptions:
            desk.land()
    known, promised = len(young.tokens), young.promised
    assert promised
    while desk.flights:
        desk.land()
    assert len(young.tokens) == known + promised and young.promised == 0
    assert old.life == 0
    desk.drain()
    assert young.tokens.tolist() == words(100, 10) + words(1010, 10)


def test_preemptions_are_few_in_a_tiny_pool() -> None:
    """Eight that grow to three quarters of the pool each: who is preempted asks for more room to spare."""
    desk = Desk(pages=40, slots=8, max_len=200, budget=64)
    for i in range(8):
        desk.ask(words(1000 * i, 4), max_tokens=110)
    desk.drain(5000)
    assert 0 < desk.scheduler.counts.preemptions < 40
    assert desk.scheduler.counts.computed < 3 * 8 * 114


@pytest.mark.parametrize("windows", [(0,), (0, 5), (5, 9)])
def test_no_evict_never_preempts_and_never_stalls(windows: tuple[int, ...]) -> None:
    desk = Desk(pages=26, windows=windows, capacity="no-evict", slots=8, budget=24)
    rng = random.Random(3)
    for i in range(24):
        desk.ask(words(1000 * (i % 3), rng.randint(1, 40)), max_tokens=rng.randint(1, 40))
    while desk.scheduler.live:
        assert desk.step() or desk.scheduler.running
    assert desk.scheduler.counts.preemptions == 0


def test_siblings_wait_and_others_pass_them() -> None:
    desk = Desk(budget=8, slots=4)
    first = desk.ask(words(0, 24))
    second = desk.ask([*words(0, 24), 5])
    stranger = desk.ask(words(500, 2))
    desk.step()
    assert second.status is Status.WAITING
    desk.step()
    desk.step()
    assert second.status is Status.WAITING
    desk.step()
    assert stranger.status is not Status.WAITING
    desk.drain()
    assert second.cached == 24
    assert desk.scheduler.counts.computed <= 24 + 3 + 1 + 3 + 2 + 3
    assert first.life == 0


@pytest.mark.parametrize("leaves", ["abort", "preempted"])
def test_a_sibling_goes_on_when_the_one_it_waits_for_leaves(leaves: str) -> None:
    desk = Desk(budget=8, pages=30)
    first, second = desk.ask(words(0, 24)), desk.ask([*words(0, 24), 5])
    desk.step()
    desk.step()
    assert second.status is Status.WAITING
    if leaves == "abort":
        desk.scheduler.abort(first.request.id)
    else:
        desk.scheduler._preempt(first, Work(0, []))
    desk.drain()
    assert second.cached == (16 if leaves == "abort" else 24)
    assert desk.scheduler.counts.computed <= 16 + 8 + 9 + 6


def test_a_one_token_end_of_a_prompt_is_published_too() -> None:
    """Its last page is complete only with a row of one token: siblings wait for that page."""
    desk = Desk(budget=7)
    desk.ask(words(0, 8), max_tokens=30)
    second = desk.ask(words(0, 8), max_tokens=1)
    for _ in range(4):
        desk.step()
    assert second.status is not Status.WAITING and second.cached == 7


def test_samples_of_one_prompt_share_its_pages() -> None:
    desk = Desk(pages=100, slots=8, budget=64)
    seqs = [desk.ask(words(0, 32), max_tokens=20) for _ in range(8)]
    while any(s.status is Status.WAITING for s in seqs):
        desk.step()
    desk.step()
    assert all(s.pages[0][:8] == seqs[0].pages[0][:8] for s in seqs), "also the last page, once published"
    assert desk.scheduler.stats().held == 8 + 8


def test_corrections_of_one_that_left_are_not_sent_to_the_next_tenant() -> None:
    desk = Desk(slots=1, budget=64)
    seq = desk.ask(words(0, 8), "a", max_tokens=5)
    desk.launch()
    desk.scheduler.fixes.append(Grant(seq.slot, 0, 0, [9]))
    desk.scheduler.abort("a")
    desk.ask([1, 2], "b")
    batch = desk.launch()
    assert batch is not None and batch.joins[0].slot == 1 and batch.grants == []


def test_drafts_ride_with_one_known_token_once_guessed() -> None:
    desk = Desk(drafts=3)
    seq = desk.ask([1, 2, 3], max_tokens=9)
    first = desk.launch()
    assert first and first.rows[0].drafts == 0
    desk.land()
    second = desk.launch()
    assert second and (second.rows[0].count, second.rows[0].drafts) == (4, 3)
    assert [o.tokens for o in desk.land([[50, 51]])] == [[50, 51]]
    assert (seq.planned, seq.computed, seq.promised) == (5, 5, 0)
    assert seq.tokens.tolist() == [1, 2, 3, 1003, 50, 51]


def test_drafts_never_pass_the_end_the_budget_or_a_grammar() -> None:
    desk = Desk(drafts=5, budget=4)
    seq = desk.ask([1, 2, 3], max_tokens=4)
    desk.step()
    assert desk.scheduler._drafts(seq, 4, 4) == 2, "of four tokens one is there, one is sampled anyway"
    desk.scheduler.free = lambda s: 2
    assert desk.scheduler._drafts(seq, 4, 4) == 1
    desk.scheduler.free = None
    desk.ask([9], max_tokens=9)
    batch = desk.launch()
    assert batch and [r.count for r in batch.rows] == [3, 1]


def test_forced_tokens_are_output_and_a_stop_among_them_ends_it() -> None:
    desk = Desk()
    seq = desk.ask([1, 2, 3], stop_ids=(9,), max_tokens=20)
    desk.launch()
    seq.ahead, seq.unsent = [8, 9, 10], [8, 9, 10]
    batch = desk.launch()
    assert batch and batch.writes[0].tokens == [8, 9, 10] and batch.rows[0].count == 4
    (output,) = desk.land([[7]])
    assert (output.tokens, output.finished) == ([7, 8, 9], "stop")
    assert desk.land([[5]]) == []


def test_logprobs_are_cut_with_the_tokens_and_only_for_who_asked() -> None:
    desk = Desk(drafts=2)
    desk.ask([1, 2], "a", logprobs=0, stop_ids=(6,), max_tokens=9)
    desk.ask([3, 4], "b", max_tokens=9)
    desk.step()
    desk.launch()
    logprobs = [[Logprob(t, -1.0, 1) for t in row] for row in ([5, 6, 7], [5, 6, 7])]
    one, two = desk.land([[5, 6, 7], [5, 6, 7]], logprobs)
    assert one.logprobs is not None and [p.token for p in one.logprobs] == [5, 6]
    assert two.logprobs is None and two.tokens == [5, 6, 7]


def test_a_replay_counts_what_was_emitted() -> None:
    desk = Desk()
    seq = desk.ask([1, 2, 3, 70, 71], emitted=2, max_tokens=4)
    batch = desk.launch()
    assert batch and batch.joins[0].prompt == 3
    desk.land()
    outputs = desk.drain()
    assert outputs[-1].finished == "length" and outputs[-1].usage
    assert (outputs[-1].usage.prompt, outputs[-1].usage.output) == (3, 4)
    over = desk.ask([1, 2, 70, 71], emitted=2, max_tokens=2)
    assert over.status is Status.FINISHED and desk.scheduler.over(over) == "length"
    over = desk.ask([1, 2, 9], emitted=1, stop_ids=(9,))
    assert desk.scheduler.over(over) == "stop"
    assert desk.scheduler.over(seq) == "length" and desk.scheduler.live == {}


def test_prefix_puts_the_longest_match_first_and_the_passed_over_before_all() -> None:
    desk = Desk(policy="prefix", slots=1)
    desk.ask(words(0, 16), max_tokens=1)
    desk.drain()
    stranger, sibling, cousin = desk.ask([99]), desk.ask([*words(0, 16), 5]), desk.ask([*words(0, 8), 5])
    policy = Prefix()
    waiting = desk.scheduler.waiting
    assert list(policy.waiting(waiting, desk.cache)) == [sibling, cousin, stranger]
    desk.step()
    assert (stranger.waited, cousin.waited) == (1, 0), "who came later is not passed over"
    stranger.waited = PATIENCE
    assert list(policy.waiting(waiting, desk.cache)) == [stranger, cousin]
    assert list(Fcfs().waiting(waiting, desk.cache)) == [stranger, cousin]


def test_priority_orders_by_the_lower_value_and_then_by_arrival() -> None:
    desk = Desk(policy="priority", slots=4)
    late, early, same = desk.ask([1], priority=1), desk.ask([2], priority=-1), desk.ask([3], priority=1)
    policy, waiting = Priority(), desk.scheduler.waiting
    assert list(policy.waiting(waiting, desk.cache)) == [early, late, same]
    assert list(policy.running(waiting)) == [early, late, same]
    assert waiting == [late, early, same], "the scheduler's own list is not touched"
    assert policy.victim(waiting, early) is same
    assert policy.victim(waiting, late) is same
    assert policy.victim(waiting, same) is None
    assert policy.victim([late, early], late) is None, "not the more urgent one, though it came later"


def test_the_least_urgent_makes_room_though_it_is_the_oldest() -> None:
    desk = Desk(pages=8, budget=64, policy="priority")
    old = desk.ask(words(0, 11), max_tokens=12, priority=1)
    urgent = desk.ask(words(100, 11), max_tokens=12)
    desk.drain()
    assert (old.life, urgent.life) == (1, 0)


def test_a_full_house_is_asked_again_only_when_something_changed() -> None:
    desk = Desk(pages=6, slots=4, budget=64)
    desk.ask(words(0, 16), max_tokens=5)
    desk.ask(words(100, 16), max_tokens=5)
    desk.step()
    calls = []
    admit = desk.cache.admit
    desk.cache.admit = lambda seq: calls.append(seq) or admit(seq)  # type: ignore[method-assign]
    desk.step()
    desk.step()
    assert calls == []
    desk.drain()
    assert len(calls) == 1


@pytest.mark.parametrize("windows", [(0,), (0, 8)])
def test_a_row_without_a_token_fails_alone_and_its_pages_are_nobodys(windows: tuple[int, ...]) -> None:
    desk = Desk(windows=windows, budget=32)
    bad, good = desk.ask(list(range(9))), desk.ask(list(range(100, 109)))
    batch = desk.launch()
    assert batch is not None
    rows, seqs, lives = desk.flights.pop(0)
    slots = {bad.slot: "no finite logit", good.slot: None}
    result = Result(batch.step, [[0], [7]], errors=[slots[row.slot] for row in rows.rows])
    outputs = {o.id: o for o in desk.scheduler.commit(rows.rows, seqs, lives, result)}
    desk.cache.check(desk.scheduler.running)
    first, second = outputs[bad.request.id], outputs[good.request.id]
    assert (first.finished, first.error, first.tokens) == ("error", "no finite logit", [])
    assert (second.finished, second.tokens) == (None, [7])
    again = desk.ask(list(range(9)))
    desk.launch()
    assert again.cached == 0
