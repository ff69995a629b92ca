"""Scenarios: a whole run as data, drawn from a seed.

Being data, a scenario can be stored, shrunk and replayed although the drawing changes later.
Each draw takes a random subset of the features ("swarm"), so that rare pairs of them meet.
"""

from __future__ import annotations

import random

from msgspec import Struct
from msgspec.structs import replace

from trine.core.types import Group, Sampling
from trine.registry import find

from .fake import VOCAB

POLICIES = sorted(find("scheduler.policies"))


class Ask(Struct, omit_defaults=True):
    """One request, when it comes, and when its client goes away."""

    id: str
    at: int  # step
    tokens: list[int]
    sampling: Sampling
    space: int = 0
    priority: int = 0
    rule: int = 0
    abort: int = -1  # once this many tokens came out; -1: never
    patience: int = -1  # abort this many steps after it came; -1: never


class Scenario(Struct, omit_defaults=True):
    """All that decides a run."""

    seed: int
    page_size: int
    groups: list[Group]
    slots: int
    budget: int
    max_len: int
    asks: list[Ask]
    depth: int = 1
    drafts: int = 0
    skill: float = 0.7
    policy: str = "fcfs"
    capacity: str = "max-use"
    lazy: bool = False
    wire: bool = False
    poll: bool = False  # launch, ready and collect, as the engine process does, and not step
    eos: list[int] = []
    flushes: list[int] = []  # steps
    losses: list[int] = []  # steps at which engine and device are lost
    hostile: list[int] = []  # steps at which requests come that can never run
    shortest: int = 1  # tokens of a run in common that is told of
    mix: tuple[int, float, int] | None = None  # ridge, reach, least


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    max_len = rng.choice([12, 24, 40, 40, 60, 90])
    budget = rng.choice([1, 2, 4, 8, 12, 16, 24, 32, 40, 64])
    drafts = rng.choice([0, 0, 0, 1, 2, 3])
    s = Scenario(
        seed=seed,
        page_size=size,
        groups=_groups(rng, size, max_len),
        slots=rng.choice([1, 2, 3, 4, 5, 6, 8, 8]),
        budget=budget,
        max_len=max_len,
        asks=[],
        depth=rng.choice([1, 1, 2, 2, 2, 3]),
        drafts=drafts,
        skill=rng.choice([0.7, 0.7, 0.0, 1.0]),
        policy=rng.choice(POLICIES),
        capacity=rng.choice(["max-use", "max-use", "no-evict"]),
        lazy=rng.random() < 0.5,
        wire=rng.random() < 0.1,
        poll=rng.random() < 0.3,
        eos=rng.choice([[], [3], [3, 4]]),
    )
    if crowded := rng.random() < 0.35:
        _crowd(rng, s)
    s.asks = _asks(rng, s, crowded)
    last = max(a.at for a in s.asks)
    if rng.random() < 0.15:
        s.flushes = [rng.randrange(last + 30) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.15:
        s.losses = [rng.randrange(1, last + 30) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.1:
        s.hostile = [rng.randrange(last + 30) for _ in range(2)]
    s.shortest = rng.choice([1, 1, 1, 6, 16])
    if rng.random() < 0.4:
        s.mix = rng.choice([1, 3, 10]), rng.choice([0.0, 0.01, 0.2]), rng.choice([1, 2, 4, 16])
    return s


def _crowd(rng: random.Random, s: Scenario) -> None:
    """More who run than memory holds to their ends: the weather of preemption."""
    s.slots, s.budget, s.max_len = rng.randint(5, 8), rng.choice([12, 20, 40]), rng.choice([30, 40, 60])
    s.page_size = rng.choice([1, 2, 4])
    s.groups = [Group(1 + -(-s.max_len // s.page_size) + rng.randint(0, 8), g.window) for g in s.groups]


def _groups(rng: random.Random, size: int, max_len: int) -> list[Group]:
    """One to three kinds of KV; pools from barely enough for one longest sequence to plenty."""
    groups = []
    for index in range(rng.choice([1, 1, 1, 2, 2, 3])):
        windowed = rng.random() < (0.15 if index == 0 else 0.85)
        window = rng.choice([1, 2, size, size + 1, 2 * size, 7, 16]) if windowed else 0
        need = -(-max_len // size)
        if windowed and rng.random() < 0.5:
            need = min(need, -(-window // size) + 1)
        groups.append(Group(1 + need + rng.choice([0, 0, 1, 2, 3, 5, 8, 12, 30]), window))
    return groups


def _asks(rng: random.Random, s: Scenario, crowded: bool) -> list[Ask]:
    """Requests with stems in common, whose lengths lie about page borders."""
    stems = [[rng.randrange(VOCAB) for _ in range(_border(rng, s))] for _ in range(rng.randint(1, 3))]
    spaces, rules = rng.choice([1, 1, 2, 3]), rng.choice([0, 0, 1, 2, 3, 4])
    if crowded:
        stems = [stem[: rng.randint(1, 6)] for stem in stems]
    pace, cut = rng.choice([0, 0, 0, 1, 2, 8]), rng.random() < 0.3
    spoil = rng.random() < 0.15
    leaving, ranked = rng.random() < 0.3, rng.random() < (0.8 if s.policy == "priority" else 0.2)
    asks: list[Ask] = []
    step = 0
    for _ in range(rng.randint(1, 12)):
        step += rng.randint(0, pace)
        tokens = rng.choice(stems)[:]
        if cut and rng.random() < 0.5:
            tokens = tokens[: rng.randint(1, len(tokens))]
        tokens += [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 2, rng.randint(0, 12)]))]
        space = rng.randrange(spaces)
        for _ in range(rng.choice([1, 1, 1, 1, 2, 4])):  # samples of one prompt
            rule = rules if rng.random() < 0.6 else 0
            sampling = _sampling(rng, space, crowded)
            if spoil and not rule and rng.random() < 0.2:
                sampling = replace(sampling, bias={rng.choice([0, 0, 1, rng.randrange(20)]): -100.0})
            asks.append(
                Ask(
                    id=f"r{len(asks)}",
                    at=step,
                    tokens=tokens[: s.max_len - 1],
                    sampling=sampling,
                    space=space,
                    priority=rng.randint(-1, 1) if ranked else 0,
                    rule=rule,
                    abort=rng.randint(0, 12) if leaving and rng.random() < 0.4 else -1,
                    patience=rng.randint(0, 20) if leaving and rng.random() < 0.3 else -1,
                )
            )
    return asks


def _border(rng: random.Random, s: Scenario) -> int:
    """A stem's length: a page border, one less, one more, or any."""
    length = rng.randint(1, max(1, (s.max_len - 2) // s.page_size)) * s.page_size + rng.choice([-1, 0, 0, 1])
    if rng.random() < 0.2:
        length = rng.randint(1, s.max_len - 1)
    return max(1, min(length, s.max_len - 1))


def _sampling(rng: random.Random, space: int, long: bool) -> Sampling:
    """The fake device reads a tenant's number from `top_k`: nothing else of a space reaches it."""
    most = rng.randint(15, 40) if long else rng.choice([1, 2, rng.randint(1, 30), rng.randint(1, 30)])
    return Sampling(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(3),
        top_k=space,
        max_tokens=most,
        min_tokens=rng.choice([0, 0, 0, rng.randint(0, most)]),
        stop_ids=rng.choice([(), (), (), (7,)] if long else [(), (), (7,), (11, 20)]),
        ignore_eos=rng.random() < (0.8 if long else 0.2),
        logprobs=rng.choice([None, None, None, 0]),
    )
