"""Who goes back in after a death: every poison found, nobody else harmed, over many random stories."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.kit.engine_process import solo, token
from trine.core.types import Output, Request, Sampling, Usage
from trine.engine.replay import CLEAR_TOKENS, LONELY_DEATHS, Replay

PROMPT = 2  # tokens of every prompt


@dataclass
class Toy:
    """An engine of one rule: a request named in `at` kills it at that output token."""

    at: dict[str, int]
    inside: dict[str, Request] = field(default_factory=dict)

    def step(self, chance: random.Random) -> list[Output] | None:
        """Some of those inside get a token; None: it died."""
        outputs = []
        for request in chance.sample(list(self.inside.values()), chance.randint(0, len(self.inside))):
            made = len(request.tokens) - PROMPT
            if self.at.get(request.id) == made:
                return None
            new = token(request.tokens, request.sampling.seed)
            request.tokens.append(new)
            done = made + 1 == request.sampling.max_tokens
            usage = Usage(PROMPT, 0, made + 1) if done else None
            outputs.append(Output(request.id, [new], "length" if done else None, usage=usage))
            if done:
                del self.inside[request.id]
        return outputs


class Story:
    """Arrivals, aborts, kills from outside and poison, until all have ended."""

    def __init__(self, seed: int, *, kills: int, poisons: int) -> None:
        self.chance = random.Random(seed)
        requests = [
            Request(
                f"r{i}",
                [i, self.chance.randrange(9)],
                Sampling(max_tokens=self.chance.randint(1, 30), seed=i),
            )
            for i in range(32)
        ]
        chosen = self.chance.sample(requests, poisons)
        self.at = {r.id: self.chance.randrange(r.sampling.max_tokens) for r in chosen}
        self.requests = {r.id: r for r in requests}
        self.arrivals, self.kills = requests[:], kills
        self.replay, self.toy = Replay(), Toy(self.at)
        self.heard: dict[str, list[Output]] = {r.id: [] for r in requests}
        self.deaths = 0

    def run(self) -> None:
        while self.arrivals or self.replay.records:
            if self.arrivals and self.chance.random() < 0.7:
                self.replay.add(self.arrivals.pop(0))
            for request in self.replay.due():
                assert request.id not in self.toy.inside
                copy = Request(request.id, list(request.tokens), request.sampling, request.emitted)
                self.toy.inside[request.id] = copy
            outputs = self.toy.step(self.chance)
            if outputs is not None and self.kills and self.chance.random() < 0.1:
                self.kills -= 1
                self.die(blamed=False)
            elif outputs is None:
                self.die(blamed=True)
            for output in outputs or []:
                if heard := self.replay.take(output):
                    self.heard[output.id].append(heard)

    def die(self, *, blamed: bool) -> None:
        self.deaths += 1
        assert self.deaths < 1000, "it never ends"
        self.toy.inside.clear()
        for output in self.replay.died(blamed):
            self.heard[output.id].append(output)

    def check(self) -> None:
        for id, outputs in self.heard.items():
            request, got = self.requests[id], [t for o in outputs for t in o.tokens]
            ends = [o.finished for o in outputs if o.finished]
            usage = outputs[-1].usage
            assert usage and (usage.prompt, usage.output) == (2, len(got)), id
            if id in self.at:
                assert ends == ["error"] and got == solo(request)[: self.at[id]], id
            else:
                assert ends == ["length"] and got == solo(request), id


@pytest.mark.parametrize("poisons,kills", [(1, 0), (1, 3), (3, 0), (3, 7), (0, 7)])
def test_each_poison_is_found_and_nobody_else_is_harmed(poisons: int, kills: int) -> None:
    for seed in range(40):
        story = Story(seed, poisons=poisons, kills=kills)
        story.run()
        story.check()
        assert story.replay.poisoned == poisons
        assert story.deaths <= kills + poisons * (kills + 12), "a bisection takes the logarithm"


def ask(id: str, length: int = 100) -> Request:
    return Request(id, [1, 2], Sampling(max_tokens=length, seed=1))


def ids(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


def grow(replay: Replay, id: str, count: int) -> None:
    for new in range(count):
        replay.take(Output(id, [new]))


def test_a_first_death_sends_everybody_again_with_what_they_have() -> None:
    replay = Replay()
    for id in "abc":
        replay.add(ask(id))
    assert ids(replay.due()) == ["a", "b", "c"] and replay.due() == []
    grow(replay, "b", 2)
    assert replay.died(True) == []
    again = replay.due()
    assert [(r.id, r.tokens, r.emitted, r.prompt) for r in again] == [
        ("a", [1, 2], 0, 2), ("b", [1, 2, 0, 1], 2, 2), ("c", [1, 2], 0, 2)
    ]  # fmt: skip


def test_a_request_that_was_a_continuation_already_stays_one() -> None:
    replay = Replay()
    replay.add(Request("a", [1, 2, 3], Sampling(max_tokens=9, seed=1), emitted=1))
    replay.due()
    grow(replay, "a", 1)
    replay.died(True)
    again = replay.due()[0]
    assert (again.tokens, again.emitted, again.prompt) == ([1, 2, 3, 0], 2, 2)


def test_a_second_death_without_progress_halves_them_and_holds_the_others_back() -> None:
    replay = Replay()
    for id in "abcd":
        replay.add(ask(id))
    replay.due()
    replay.died(True)
    replay.due()
    replay.died(True)
    assert ids(replay.due()) == ["a", "b"]
    replay.add(ask("new"))
    assert replay.due() == []  # a newcomer would only be suspected
    grow(replay, "a", CLEAR_TOKENS)
    assert replay.due() == []  # b has not shown anything yet
    grow(replay, "b", CLEAR_TOKENS)
    assert ids(replay.due()) == ["c", "d"]
    replay.drop("c")
    grow(replay, "d", CLEAR_TOKENS)
    assert ids(replay.due()) == ["new"]


def test_progress_clears_a_suspect() -> None:
    replay = Replay()
    for id in "ab":
        replay.add(ask(id))
    for _ in range(10):
        assert ids(replay.due()) == ["a", "b"]
        grow(replay, "a", CLEAR_TOKENS)
        grow(replay, "b", CLEAR_TOKENS)
        assert replay.died(True) == []
    assert replay.poisoned == 0 and replay.barren == 1


def test_a_signal_from_outside_convicts_nobody_at_once() -> None:
    replay = Replay()
    replay.add(ask("a"))
    deaths = 0
    while replay.records:
        assert ids(replay.due()) == ["a"] and replay.barren == deaths
        ends = replay.died(False)
        deaths += 1
    assert deaths == LONELY_DEATHS + 1 and ends[0].finished == "error" and replay.barren == 0


def test_usage_tells_what_was_found_when_the_first_token_came() -> None:
    replay = Replay()
    replay.add(ask("a"))
    replay.due()
    replay.died(False)  # nothing was told: what a second life finds, counts
    replay.due()
    first = replay.take(Output("a", [5], usage=Usage(2, 1, 1)))
    assert first and first.usage is None  # counts are for the last one
    replay.died(False)
    replay.due()
    last = replay.take(Output("a", [6], "stop", usage=Usage(2, 0, 2, preemptions=3)))
    assert last and last.usage == Usage(prompt=2, cached=1, output=2, preemptions=3)


def test_what_is_said_of_strangers_is_dropped_and_counted() -> None:
    replay = Replay()
    replay.add(ask("outside"))
    assert replay.take(Output("nobody", [1])) is None
    assert replay.take(Output("outside", [1])) is None
    assert replay.late == 2 and not replay.records["outside"].emitted


def test_an_aborted_request_does_not_go_back_in() -> None:
    replay = Replay()
    for id in "ab":
        replay.add(ask(id))
    replay.due()
    grow(replay, "a", 3)
    replay.records["a"].aborted = True
    ends = replay.died(False)
    assert [(e.id, e.finished) for e in ends] == [("a", "abort")] and ends[0].usage == Usage(2, 0, 3)
    assert ids(replay.due()) == ["b"]
