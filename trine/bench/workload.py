"""The workloads of `trine bench offline`: seeded requests that any engine can replay, as token ids.

Only random.Random's randint and shuffle are used, which give the same on every Python 3. It does not know how
they are run.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct

Asked = tuple[list[int], int]  # token ids of a prompt, and how many tokens are wanted back


def unique(count: int = 256, low: int = 100, high: int = 1024, seed: int = 0) -> list[Asked]:
    """Lengths of prompts and of answers uniform in low..high; nothing is shared."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return [(prompt, rng.randint(low, high)) for prompt in prompts]


def fixed(count: int, ins: int, outs: int, seed: int, vocab: int = 100_000) -> list[Asked]:
    """All of the same lengths; nothing is shared."""
    rng = random.Random(seed)
    return [([rng.randint(0, vocab) for _ in range(ins)], outs) for _ in range(count)]


def shared(
    groups: int = 8, each: int = 32, prefix: int = 2048, own: int = 128, outs: int = 128, seed: int = 3
) -> list[Asked]:
    """`each` requests for every group: the group's prefix, then tokens of their own; in a random order."""
    rng = random.Random(seed)
    asked = []
    for _ in range(groups):
        common = [rng.randint(0, 100_000) for _ in range(prefix)]
        for _ in range(each):
            asked.append((common + [rng.randint(0, 100_000) for _ in range(own)], outs))
    rng.shuffle(asked)
    return asked


class Work(Struct, frozen=True):
    """One workload. `measure`: "all" (how fast all are done), "stream" (one after the other, token by token),
    "prompts" (how fast prompts are read), "steps" (how long a step of so many rows takes)."""

    what: str
    measure: str
    make: Callable[[int], list[Asked]]  # by round, or for "steps" by rows
    temperature: float = 0.0
    warm: Callable[[], list[Asked]] | None = None  # other requests of the same shape, before the clock starts
    rounds: int = 1
    rows: tuple[int, ...] = ()  # for "steps"
    together: int = 0  # at most so many at once; 0: all


def _w1_warm() -> list[Asked]:
    return [(prompt, 32) for prompt, _ in unique(seed=4321)]


def _shared_warm() -> list[Asked]:
    return shared(groups=2, each=8, outs=16, seed=33)


WORKS = {
    "w1": Work(
        "256 requests that share nothing, 100-1,024 tokens in and out",
        "all",
        lambda _: unique(),
        1.0,
        _w1_warm,
    ),
    "w2": Work(
        "200 requests of 512 in, 256 out, 50 at a time",
        "all",
        lambda _: fixed(200, 512, 256, 2),
        1.0,
        together=50,
    ),
    "w3": Work(
        "8 groups of 32 that share 2,048 tokens, 128 of their own, 128 out",
        "all",
        lambda _: shared(),
        1.0,
        _shared_warm,
    ),
    "w3l": Work(
        "8 groups of 32 that share 8,192 tokens, 128 of their own, 256 out",
        "all",
        lambda _: shared(prefix=8192, outs=256, seed=31),
        1.0,
        _shared_warm,
    ),
    "w4": Work("one stream, 512 in, 256 out", "stream", lambda i: fixed(1, 512, 256, 40 + i), rounds=5),
    "w5": Work("16 prompts of 4,096 tokens", "prompts", lambda i: fixed(16, 4096, 1, 50 + i), rounds=3),
    "w7": Work(
        "steps of rows that all decode, 512 in, 128 out",
        "steps",
        lambda rows: fixed(rows, 512, 128, 100 + rows),
        rows=(1, 50, 256),
    ),
}


def warm_up() -> list[list[Asked]]:
    """Before the first workload: other tokens than any of theirs."""
    return [unique(48, 100, 512, seed=12345), *(fixed(rows, 64, 16, 777 + rows) for rows in (1, 50))]


def totals(asked: list[Asked]) -> tuple[int, int]:
    """Tokens in, tokens out."""
    return sum(len(prompt) for prompt, _ in asked), sum(outs for _, outs in asked)
