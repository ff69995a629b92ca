"""What the engine core promises, each on a scenario of its own, on the fake device."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.kit import workload
from tests.kit.engine import Kit, fake_kit
from tests.kit.scenario import POLICIES
from trine.core.types import Group, Output, Request, Sampling
from trine.scheduler.mix import Mix
from trine.scheduler.work import Work


def ask(name: str, tokens: list[int], space: str = "", **sampling: object) -> Request:
    values = {"temperature": 0.0, "seed": 0, "max_tokens": 4, "top_k": int(space or 0)} | sampling
    return Request(id=name, tokens=tokens, sampling=Sampling(**values), space=space)


def drain(kit: Kit) -> list[Output]:
    """All outputs until nothing is left to do, the cache checked after each step."""
    outputs: list[Output] = []
    while kit.engine.busy:
        outputs += kit.engine.step()
        kit.cache.check(list(kit.scheduler.running))
    return outputs


def answer(kit: Kit, request: Request) -> Output:
    """The last output of a request that runs alone."""
    kit.engine.add(request)
    return drain(kit)[-1]


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_wholly_cached_prompt_computes_one_token(size: int, more: int) -> None:
    """Also when it ends at a page border, where nothing of the last page is missing."""
    kit = fake_kit(page_size=size, max_len=100)
    tokens = prompt(3 * size + more if 3 * size + more > 1 else 2)
    answer(kit, ask("first", tokens, max_tokens=2 * size + 2))
    before = kit.device.seen["tokens"]
    usage = answer(kit, ask("again", tokens, max_tokens=1)).usage
    assert kit.device.seen["tokens"] - before == 1
    assert usage and usage.cached == len(tokens) - 1


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("windows", [[0], [0, 20]])
def test_a_repeated_prompt_computes_one_token(size: int, windows: list[int]) -> None:
    """At any length about page borders, also when its last page was never full."""
    for length in range(2, 2 * size + 4):
        for made in (1, 2, size + 1):
            kit = fake_kit(page_size=size, max_len=100, groups=[Group(100, w) for w in windows])
            answer(kit, ask("first", prompt(length), max_tokens=made))
            before = kit.device.seen["tokens"]
            usage = answer(kit, ask("again", prompt(length), max_tokens=1)).usage
            assert kit.device.seen["tokens"] - before == 1, (length, made)
            assert usage and usage.cached == length - 1


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_second_turn_of_a_chat_computes_only_what_is_new(size: int, depth: int) -> None:
    """The answer is in the cache too, to the token: all but its last one, which was never computed."""
    for length in range(35, 37 + size):
        kit = fake_kit(page_size=size, max_len=100, depth=depth)
        kit.engine.add(ask("first", prompt(length), max_tokens=8))
        said = [t for o in drain(kit) for t in o.tokens]
        before = kit.device.seen["tokens"]
        usage = answer(kit, ask("second", prompt(length) + said + prompt(5, seed=2), max_tokens=1)).usage
        assert kit.device.seen["tokens"] - before == 1 + 5, length
        assert usage and usage.cached == length + 8 - 1


def test_what_an_abort_leaves_is_found_again() -> None:
    kit = fake_kit(page_size=16, max_len=100, depth=2, lazy=True)
    kit.engine.add(ask("first", prompt(37), max_tokens=40))
    for _ in range(5):
        kit.engine.step()
    kit.engine.abort("first")
    drain(kit)
    usage = answer(kit, ask("again", prompt(37), max_tokens=1)).usage
    assert usage and usage.cached == 36


def test_who_is_preempted_computes_nothing_again_while_its_pages_are_there() -> None:
    kit = fake_kit(page_size=16, max_len=100)
    kit.engine.add(ask("r", prompt(37), max_tokens=10))
    for _ in range(4):
        kit.engine.step()
    [seq] = kit.scheduler.running
    kit.scheduler._preempt(seq, Work(0, []))
    drain(kit)
    assert seq.life == 1
    assert kit.device.seen["tokens"] == 37 + 10 - 1


def test_what_was_used_least_recently_is_evicted_first() -> None:
    kit = fake_kit(page_size=4, max_len=100, groups=[Group(1 + 50)])
    for name, seed in (("a", 1), ("b", 2), ("a again", 1), ("c", 3)):
        answer(kit, ask(name, prompt(80, seed), max_tokens=1))
    usage = answer(kit, ask("a at last", prompt(80, 1), max_tokens=1)).usage
    assert usage and usage.cached == 79


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_that_arrive_together_compute_their_prefix_once(depth: int) -> None:
    kit = fake_kit(slots=32, budget=256, max_len=1100, groups=[Group(3000)], depth=depth)
    stem = prompt(1024)
    for i in range(32):
        kit.engine.add(ask(f"r{i}", [*stem, i], max_tokens=1))
    drain(kit)
    assert kit.device.seen["tokens"] <= 1024 + 32
    assert kit.engine.stats().computed_tokens <= 1024 + 32


def test_samples_of_a_long_prompt_take_a_quarter_of_the_pages() -> None:
    """n = 8 on 2,048 tokens against eight requests that share nothing."""

    def most_pages(spaces: list[str]) -> int:
        kit = fake_kit(slots=8, budget=512, max_len=2200, groups=[Group(8 * 140)])
        for i, space in enumerate(spaces):
            kit.engine.add(ask(f"r{i}", prompt(2048), space, temperature=1.0, seed=i, max_tokens=40))
        most = 0
        while kit.engine.busy:
            kit.engine.step()
            most = max(most, kit.engine.stats().held)
        return most

    assert 4 * most_pages([""] * 8) <= most_pages([str(i) for i in range(8)])


def _crowd(policy: str, seed: int) -> tuple[int, int]:
    """Three documents, asked about in turn, where only one and a half fit: (computed tokens, steps)."""
    kit = fake_kit(policy=policy, slots=2, budget=64, max_len=120, page_size=4, groups=[Group(60)])
    stems, rng = [prompt(90, s) for s in range(3)], random.Random(seed)
    order = [i % 3 for i in range(36)]
    rng.shuffle(order)
    for i, stem in enumerate(order):
        kit.engine.add(ask(f"r{i}", [*stems[stem], i], max_tokens=3))
    steps = 0
    while kit.engine.busy:
        kit.engine.step()
        steps += 1
    return kit.device.seen["tokens"], steps


def test_the_prefix_policy_computes_less_in_a_tiny_pool() -> None:
    prefix = sum(_crowd("prefix", s)[0] for s in range(5))
    fcfs = sum(_crowd("fcfs", s)[0] for s in range(5))
    assert prefix < 0.7 * fcfs, (prefix, fcfs)


def test_the_prefix_policy_starves_nobody() -> None:
    """A stranger's turn comes although better matches never stop arriving."""
    kit = fake_kit(policy="prefix", slots=1, budget=64, max_len=120, page_size=4, groups=[Group(60)])
    stem = prompt(60)
    kit.engine.add(ask("r0", [*stem, 0]))
    for _ in range(3):
        kit.engine.step()
    kit.engine.add(ask("stranger", prompt(70, seed=9)))
    for i in range(1, 4000):
        if len(kit.scheduler.waiting) < 4:
            kit.engine.add(ask(f"r{i}", [*stem, i % 50]))
        if any(o.id == "stranger" and o.finished for o in kit.engine.step()):
            return
    pytest.fail("the stranger still waits")


def test_the_priority_policy_starves_nobody_of_the_lowest_value() -> None:
    """A stream of others that are less urgent, or as urgent and later, never passes it."""
    kit = fake_kit(policy="priority", slots=1, budget=64, max_len=120, page_size=4, groups=[Group(60)])
    rank = iter(range(4000))

    def come(priority: int) -> None:
        kit.engine.add(Request(f"r{next(rank)}", prompt(20), Sampling(max_tokens=3), priority=priority))

    for priority in (2, 1, 1, 0, 0, 5):
        come(priority)
    ends: list[str] = []
    while len(ends) < 6:
        ends += [o.id for o in kit.engine.step() if o.finished]
        if len(kit.scheduler.waiting) < 8:
            come(5)
    assert ends == ["r3", "r4", "r1", "r2", "r0", "r5"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", ["max-use", "no-evict"])
def test_among_equals_no_policy_starves_anybody(policy: str, capacity: str) -> None:
    """Whoever waits when a stream begins that never ends, and asks for what is cached, is served in it."""
    kit = fake_kit(
        policy=policy, capacity=capacity, slots=3, budget=64, max_len=120, page_size=4, groups=[Group(45)]
    )
    stem = prompt(60)
    answer(kit, ask("before", [*stem, 0]))
    waits = {f"stranger {i}" for i in range(8)}
    for i, name in enumerate(sorted(waits)):
        kit.engine.add(ask(name, prompt(70, seed=9 + i), max_tokens=30, ignore_eos=True))
    for i in range(3000):
        if len(kit.scheduler.waiting) < 12:
            kit.engine.add(ask(f"r{i}", [*stem, i % 50], max_tokens=20, ignore_eos=True))
        waits -= {o.id for o in kit.engine.step() if o.finished}
        if not waits:
            return
    pytest.fail(f"{sorted(waits)} still wait")


def test_by_priority_a_higher_value_waits_while_there_is_enough_of_a_lower_one_and_no_longer() -> None:
    """All that it is promised: it is served once nobody lower wants the room, and what runs is not stopped."""
    kit = fake_kit(policy="priority", slots=2, budget=64, max_len=120, page_size=4, groups=[Group(200)])

    def come(name: str, priority: int, most: int = 4) -> None:
        sampling = Sampling(max_tokens=most, ignore_eos=True)
        kit.engine.add(Request(name, prompt(20, seed=len(name)), sampling, priority=priority))

    come("runs", 9, 50)
    kit.engine.step()
    come("late", 5)
    come("later", 5)
    ends: list[str] = []
    for i in range(300):  # one slot's worth of urgent ones
        if len(kit.scheduler.waiting) < 4:
            come(f"r{i}", -1)
            come(f"r{i} too", -1)
        ends += [o.id for o in kit.engine.step() if o.finished]
    assert not {"late", "later"} & set(ends), "while the lower ones take all there is"
    assert "runs" in ends and kit.engine.stats().preemptions == 0, "it had its slot, and memory was enough"
    ends += [o.id for o in drain(kit) if o.finished]
    assert ends[-2:] == ["late", "later"]


def test_by_priority_nobody_waits_for_a_higher_value() -> None:
    """With and without a stream of less urgent ones the same step answers, where a slot is free."""

    def served(stream: bool) -> int:
        kit = fake_kit(policy="priority", slots=2, budget=64, max_len=120, page_size=4, groups=[Group(200)])
        for i in range(40 * stream):
            kit.engine.add(Request(f"low {i}", prompt(20, seed=i), Sampling(max_tokens=3), priority=3))
        kit.engine.add(Request("urgent", prompt(30, seed=99), Sampling(max_tokens=3), priority=1))
        for step in range(200):
            if any(o.id == "urgent" and o.finished for o in kit.engine.step()):
                return step
        raise AssertionError("never served")

    assert served(True) == served(False)


def test_a_prompt_goes_on_beside_rows_of_one_token_whatever_it_costs() -> None:
    kit = fake_kit(max_len=200, mix=Mix(1, 1.0, 2))
    for i in range(4):
        kit.engine.add(ask(f"r{i}", [i], max_tokens=150, ignore_eos=True))
    for _ in range(3):
        kit.engine.step()
    kit.engine.add(ask("long", prompt(40), max_tokens=1))
    heard = [o.id for _ in range(21) for o in kit.engine.step()]
    assert "long" in heard, "two tokens a step"
    assert heard.count("r0") == 21


def test_a_prompt_that_is_put_off_is_asked_again_in_the_next_step() -> None:
    """It is not too big for memory: only that is remembered until someone leaves."""
    kit = fake_kit(max_len=200, page_size=4, mix=Mix(20, 1.0, 4))
    answer(kit, ask("before", prompt(52), max_tokens=1))
    kit.engine.add(ask("row", [1], max_tokens=150, ignore_eos=True))
    kit.engine.step()
    kit.engine.add(ask("short", [2, 3, 4], max_tokens=150, ignore_eos=True))
    kit.engine.add(ask("far on", prompt(52) + [1] * 8, max_tokens=150, ignore_eos=True))
    heard = [sorted(o.id for o in kit.engine.step()) for _ in range(4)]
    assert heard[0] == ["row", "short"], "all that one step has room for"
    assert "far on" in heard[3], heard


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_tokens(policy: str) -> None:
    """Alone and in a crowd that is preempted, with prompts of some beside single tokens of others."""
    requests = [
        ask(f"r{i}", prompt(9 + i % 5) + [i], temperature=1.0, seed=i, max_tokens=30, min_tokens=20)
        for i in range(16)
    ]
    wanted = {request.id: answers(fake_kit(max_len=64, page_size=4), [request]) for request in requests}
    kit = fake_kit(
        policy=policy, slots=8, max_len=64, page_size=4, groups=[Group(1 + 26)], depth=2, mix=Mix(6, 0.1, 2)
    )
    ranked = [replace(request, priority=index % 3) for index, request in enumerate(requests)]
    got = answers(kit, ranked)
    assert kit.engine.stats().preemptions > 0
    assert got == {name: tokens for one in wanted.values() for name, tokens in one.items()}


def answers(kit: Kit, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        kit.engine.add(request)
    got: dict[str, list[int]] = {request.id: [] for request in requests}
    for output in drain(kit):
        got[output.id] += output.tokens
    return got


@pytest.mark.parametrize("policy", POLICIES)
def test_no_evict_never_preempts(policy: str) -> None:
    """The same crowd is preempted when memory is filled to the brim, so the test can fail."""
    preempted = {}
    for capacity in ("max-use", "no-evict"):
        kit = fake_kit(
            policy=policy, capacity=capacity, slots=8, max_len=64, page_size=4, groups=[Group(1 + 16 + 10)]
        )
        for i in range(24):
            kit.engine.add(ask(f"r{i}", prompt(10, seed=i), temperature=1.0, seed=i, max_tokens=40))
        drain(kit)
        preempted[capacity] = kit.engine.stats().preemptions
    assert preempted["max-use"] > 0
    assert preempted["no-evict"] == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("after", range(0, 14, 2))
def test_an_abort_frees_everything_within_one_step(depth: int, after: int) -> None:
    kit = fake_kit(depth=depth, budget=8, max_len=80, page_size=4, lazy=True)
    kit.engine.add(ask("r", prompt(30), max_tokens=40))
    for _ in range(after):
        kit.engine.step()
    kit.engine.abort("r")
    outputs = kit.engine.step()
    assert [(o.id, o.finished) for o in outputs] == [("r", "abort")]
    assert outputs[0].usage and outputs[0].usage.prompt == 30
    stats = kit.engine.stats()
    assert (stats.running, stats.waiting, stats.held) == (0, 0, 0)
    assert drain(kit) == []
    kit.engine.flush()
    assert len(kit.free(0)) == kit.engine.stats().pages


def test_tenants_never_share() -> None:
    """Neither pages nor what a cache hit would tell of another's prompt."""
    kit = fake_kit(max_len=100, tag=lambda s: s.top_k)
    for space in ("1", "2", "3"):
        usage = answer(kit, ask(f"r{space}", prompt(80), space)).usage
        assert usage and usage.cached == 0
    usage = answer(kit, ask("again", prompt(80), "2")).usage
    assert usage and usage.cached == 79


def test_little_memory_is_wasted_on_a_mixed_load() -> None:
    """64 requests at once of a realistic mix of lengths, page 16: positions held and not filled."""
    run = workload.Run(6000).drain(workload.requests(128))
    used, reserved = run.full
    assert reserved > 0, "never 64 at once"
    assert 1 - used / reserved < 0.04, (used, reserved)


def test_older_ways_take_more_steps() -> None:
    """Continuous batching and pages earn what the report says they do."""
    for rows in workload.compare(48, slots=16).values():
        ours, theirs = rows.values()
        assert ours["steps"] < theirs["steps"]
        assert ours["output_tokens"] == theirs["output_tokens"]


@pytest.mark.parametrize("emitted", [0, 1, 5, 11, 12])
def test_a_replay_goes_on_where_the_client_is(emitted: int) -> None:
    request = ask("r", prompt(20), temperature=1.0, max_tokens=12, min_tokens=12)
    kit = fake_kit(max_len=100)
    kit.engine.add(request)
    whole = [t for o in drain(kit) for t in o.tokens]
    again = Request("r", request.tokens + whole[:emitted], request.sampling, emitted=emitted)
    kit = fake_kit(max_len=100)
    kit.engine.add(again)
    outputs = drain(kit)
    assert [t for o in outputs for t in o.tokens] == whole[emitted:]
    usage = outputs[-1].usage
    assert usage and (usage.prompt, usage.output) == (20, 12)
