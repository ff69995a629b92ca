"""Ready engines on the fake device: for the simulation, and for tests of what stands in front."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any

from trine.cache.manager import Cache
from trine.core.types import Group, Sampling
from trine.engine.engine import Engine
from trine.registry import find
from trine.scheduler.mix import Mix
from trine.scheduler.scheduler import Scheduler

from .fake import VOCAB, FakeExecutor
from .grammar import ToyGrammars
from .scenario import Scenario
from .watch import Watch


@dataclass
class Kit:
    """An engine and all it is made of."""

    engine: Engine
    scheduler: Scheduler
    cache: Cache
    device: FakeExecutor
    grammars: ToyGrammars

    def free(self, group: int) -> list[int]:
        """The free pages of a group's pool."""
        return list(self.cache.pools[group].free)

    def left(self) -> list[str]:
        """What is still kept although no request lives; free lists are meant to be full."""
        return [
            f"{type(owner).__name__}.{name}: {value!r}"
            for owner in (self.engine, self.scheduler)
            for name, value in _fields(owner)
            if isinstance(value, (dict, list, set, deque)) and value and name not in KEPT
        ]


KEPT = {"slots", "eos", "groups"}  # full when nothing lives
KEPT |= {"told"}  # the device keeps its runs until the next batch, when nobody of them may be left


def _fields(owner: Any) -> list[tuple[str, Any]]:
    names = getattr(owner, "__slots__", None) or vars(owner)
    return [(name, getattr(owner, name)) for name in names]


def fake_kit(
    *,
    groups: list[Group] | None = None,
    page_size: int = 16,
    slots: int = 8,
    budget: int = 256,
    max_len: int = 512,
    depth: int = 1,
    drafts: int = 0,
    policy: str = "fcfs",
    capacity: str = "max-use",
    shortest: int = 1,
    mix: Mix | None = None,
    eos: Seq[int] = (),
    vocab: int = VOCAB,
    rng: random.Random | None = None,
    **device: Any,
) -> Kit:
    """`device`: lazy, wire, skill, tag of the FakeExecutor."""
    groups = groups or [Group(1 + 8 * -(-max_len // page_size))]
    pages = Cache(groups, page_size, shortest)
    scheduler = Scheduler(
        pages,
        slots=slots,
        budget=budget,
        max_len=max_len,
        policy=_policies()[policy](),
        capacity=capacity,
        drafts=drafts,
        mix=mix,
    )
    fake = FakeExecutor(groups, page_size, slots, max_len, drafts, rng, vocab=vocab, budget=budget, **device)
    grammars = ToyGrammars()
    engine = Engine(scheduler, fake, eos=list(eos), vocab=vocab, grammars=grammars, depth=depth)
    fake.watch = Watch(scheduler, pages, fake.full[0] if fake.full else None)
    return Kit(engine, scheduler, pages, fake, grammars)


def fake_engine(**options: Any) -> Engine:
    """An Engine that answers at once, without torch: a hash of the request is its model."""
    return fake_kit(**options).engine


def build(s: Scenario, rng: random.Random) -> Kit:
    """What a scenario asks for."""
    return fake_kit(
        groups=s.groups,
        page_size=s.page_size,
        slots=s.slots,
        budget=s.budget,
        max_len=s.max_len,
        depth=s.depth,
        drafts=s.drafts,
        policy=s.policy,
        capacity=s.capacity,
        shortest=s.shortest,
        mix=Mix(*s.mix) if s.mix else None,
        eos=s.eos,
        rng=rng,
        lazy=s.lazy,
        wire=s.wire,
        skill=s.skill,
        tag=_space,
    )


@cache
def _policies() -> dict[str, Any]:
    return find("scheduler.policies")  # looks at every installed package: once is enough


def _space(sampling: Sampling) -> int:
    return sampling.top_k
