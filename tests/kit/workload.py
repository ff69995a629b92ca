"""One realistic, seeded workload, and what the engine makes of it beside two older ways.

The older ways: to reserve memory for each request's longest answer, and to run a batch until its
last request ends before taking the next (static batching). Counted in steps and KV positions, so
it holds on any machine. Nothing here checks correctness: the simulation does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from trine.core.types import Group, Request, Sampling

from .engine import fake_engine

VOCAB = 1000
STOPS = tuple(range(6))  # an answer ends after some 165 tokens
LIMIT = 1024  # what clients ask for: max_tokens
MAX_LEN = 3072
SLOTS, BUDGET, PAGE = 64, 512, 16


def requests(count: int, seed: int = 7) -> list[Request]:
    """Prompts of 16 to 1,500 tokens, half of them 220 or less; a third begin with a common system prompt."""
    rng = random.Random(seed)
    system = [rng.randrange(6, VOCAB) for _ in range(150)]
    out = []
    for index in range(count):
        length = min(1500, max(16, int(rng.lognormvariate(5.4, 0.7))))
        tokens = [rng.randrange(6, VOCAB) for _ in range(length)]
        if rng.random() < 1 / 3:
            tokens = system + tokens
        sampling = Sampling(seed=index, max_tokens=LIMIT, stop_ids=STOPS)
        out.append(Request(id=str(index), tokens=tokens, sampling=sampling, arrived=float(index)))
    return out


class Run:
    """Feeds an engine and keeps the sums that the report divides."""

    def __init__(self, pages: int, slots: int = SLOTS) -> None:
        self.engine = fake_engine(
            groups=[Group(pages)], page_size=PAGE, slots=slots, budget=BUDGET, max_len=MAX_LEN, vocab=VOCAB
        )
        self.steps = self.output = self.used = self.reserved = self.running = 0
        self.slots, self.full = slots, [0, 0]  # used and reserved while every slot is taken
        self.live: dict[str, Request] = {}

    def drain(self, asks: list[Request]) -> Run:
        for ask in asks:
            self.live[ask.id] = ask
            self.engine.add(ask)
        while self.engine.busy:
            outputs = self.engine.step()
            stats = self.engine.stats()
            self.steps += 1
            self.output += sum(len(o.tokens) for o in outputs)
            self.used += stats.used_tokens
            self.reserved += stats.reserved_tokens
            self.running += stats.running
            if stats.running == self.slots:
                self.full = [self.full[0] + stats.used_tokens, self.full[1] + stats.reserved_tokens]
            for o in outputs:
                if o.finished:
                    del self.live[o.id]
        return self

    @property
    def waste(self) -> float:
        return 1 - self.used / self.reserved


def answers(asks: list[Request]) -> dict[str, int]:
    """How long each answer is: the engine's own, with plenty of everything."""
    engine = fake_engine(
        groups=[Group(60_000)], page_size=PAGE, slots=256, budget=65_536, max_len=MAX_LEN, vocab=VOCAB
    )
    lengths: dict[str, int] = {}
    for ask in asks:
        engine.add(ask)
    while engine.busy:
        for o in engine.step():
            if o.usage:
                lengths[o.id] = o.usage.output
    return lengths


def reserving(
    asks: list[Request], lengths: dict[str, int], memory: int, slots: int
) -> Iterator[tuple[int, int, int, int]]:
    """The older way, step by step: (running, output tokens, positions used, positions reserved).

    The same slots and budget; a request is taken when prompt and longest answer fit in memory."""
    waiting, running = deque(asks), {}  # id: [ask, tokens with KV]
    while waiting or running:
        reserved = sum(len(a.tokens) + LIMIT for a, _ in running.values())
        while waiting and len(running) < slots and reserved + len(waiting[0].tokens) + LIMIT <= memory:
            ask = waiting.popleft()
            running[ask.id] = (ask, 0)
            reserved += len(ask.tokens) + LIMIT
        left, made = BUDGET, 0
        for name, (ask, done) in list(running.items()):
            count = min(left, max(1, len(ask.tokens) - done))
            left -= count
            running[name] = (ask, done + count)
            made += count > 0 and done + count >= len(ask.tokens)
            if done + count >= len(ask.tokens) + lengths[name] - 1 and count:
                del running[name]
        yield len(running), made, sum(done for _, done in running.values()), reserved


def compare(count: int = 400, slots: int = SLOTS) -> dict[str, dict[str, dict[str, float]]]:
    """Both comparisons, for the report of tools/sim.py."""
    asks = requests(count)
    return {
        "memory for 16,384 KV positions, against reserving each request's longest answer": _memory(
            asks, slots
        ),
        "continuous batching, against batches that wait for their last request": _batching(asks, slots),
    }


def _memory(asks: list[Request], slots: int) -> dict[str, dict[str, float]]:
    memory = 16_384
    ours = Run(memory // PAGE + 1, slots).drain(asks)
    steps = running = made = used = reserved = 0
    for r, m, u, v in reserving(asks, answers(asks), memory, slots):
        steps, running, made, used, reserved = steps + 1, running + r, made + m, used + u, reserved + v
    return {
        "trine: pages of 16": _row(ours.steps, ours.output, ours.running, ours.waste),
        "reserving prompt + max_tokens": _row(steps, made, running, 1 - used / reserved),
    }


def _batching(asks: list[Request], slots: int) -> dict[str, dict[str, float]]:
    plenty = 60_000
    ours = Run(plenty, slots).drain(asks)
    static = Run(plenty, slots)
    for first in range(0, len(asks), slots):
        static.drain(asks[first : first + slots])
    return {
        "trine: continuous": _row(ours.steps, ours.output, ours.running, ours.waste),
        f"static batches of {slots}": _row(static.steps, static.output, static.running, static.waste),
    }


def _row(steps: int, output: int, running: int, waste: float) -> dict[str, float]:
    return {
        "steps": steps,
        "output_tokens": output,
        "tokens_per_step": round(output / steps, 2),
        "running": round(running / steps, 1),
        "waste_percent": round(100 * waste, 2),
    }
