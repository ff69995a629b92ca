"""One run of a scenario: the real engine core on the fake device, watched after every step.

Who checks what. `Cache.check`: pages are conserved, counts and locks are right, the tree is well
formed, nobody's page can be written by another. The device: what it reads is what was meant, tokens
are known, budget and seats are kept. Here: progress, bounded preemption, first come first served,
one end for each request, what came is a prefix of the oracle's answer and in the end all of it,
usage, an abort within one step, nothing left at the end. It does not know how the engine decides.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trine.core.types import Output, Request, Sampling, Sequence, Status
from trine.errors import RequestError

from .engine import Kit, build
from .fake import VOCAB
from .oracle import oracle
from .scenario import Ask, Scenario, draw

IDLE = 4  # turns in a row in which nothing moves although there is work: stuck
POLLED = 120  # the same when a turn may choose to do nothing
RANKS: dict[str, Callable[[Sequence], tuple[int, ...]]] = {
    "fcfs": lambda s: (s.ticket,),
    "priority": lambda s: (s.request.priority, s.ticket),
}
PREEMPTED = 12  # times, of one request: each time it comes back with more room to spare


@dataclass(slots=True)
class Stream:
    """What the client of one request has seen, and what it should see."""

    ask: Ask
    want: list[int]
    why: str
    got: list[int] = field(default_factory=list)
    came: int = -1  # step of arrival
    left: int = -1  # step of the abort
    finished: str | None = None


class Simulation:
    """`run()` returns what happened, by count; an AssertionError is a fault of the core."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.rng = random.Random(scenario.seed)
        self.kit: Kit = build(scenario, self.rng)
        self.seen: Counter[str] = Counter()
        self.step = 0
        self.idle = 0
        self.due = sorted(map(self._stream, scenario.asks), key=lambda t: t.ask.at, reverse=True)
        self.open: dict[str, Stream] = {}  # sent and not ended
        self.free: list[set[int]] = [set() for _ in scenario.groups]
        self.ran: set[int] = set()  # tickets of all that ever ran
        self.bound = 200 + 4 * sum(len(t.ask.tokens) + len(t.want) + 4 for t in self.due)

    def _stream(self, ask: Ask) -> Stream:
        sampling = ask.sampling
        if not sampling.ignore_eos:
            sampling = msgspec.structs.replace(sampling, stop_ids=sampling.stop_ids + tuple(self.s.eos))
        model = self.kit.device.model
        return Stream(ask, *oracle(model, ask.tokens, sampling, self.s.max_len, ask.space, ask.rule))

    def run(self) -> Counter[str]:
        while self.due or self.open or self.kit.engine.busy:
            moved = self.events()
            before, oldest = self._mark(), self._first()
            outputs = self.turn()
            if not self.s.poll:  # which may launch twice: an older one may come back in between
                assert all(s.status is not Status.WAITING for s in oldest), "the first was preempted"
            for output in outputs:
                self.hear(output)
            if moved or outputs or self._mark() != before:
                self.audit()
                self.seen["steps"] += 1  # turns in which nothing moves are not counted
                self.idle = 0
            else:
                self.idle += bool(self.open)
            assert self.idle < (POLLED if self.s.poll else IDLE), f"no progress, with {len(self.open)} open"
            self.step += 1
            assert self.step < self.bound, f"{len(self.open)} still open after {self.step} steps"
        self.end()
        self._cover()
        return self.seen

    def _first(self) -> list[Sequence]:
        """In the policy's order of those that run: it always goes on."""
        scheduler = self.kit.scheduler
        return list(scheduler.policy.running(scheduler.running))[:1]

    def _mark(self) -> tuple[int, int]:
        device = self.kit.device
        return device.step, device.taken

    # ---- what happens from outside ------------------------------------------------------
    def events(self) -> bool:
        """What clients and fate do before a turn; whether they did anything to what is there."""
        while self.due and self.due[-1].ask.at <= self.step:
            self.send(self.due.pop())
        leaving = [s for s in self.open.values() if s.left < 0 and self._leaves(s)]
        for stream in leaving:
            stream.left = self.step
            self.kit.engine.abort(stream.ask.id)
            self.seen["aborts"] += 1
        if flush := self.step in self.s.flushes:
            self.kit.engine.flush()
            self.seen["flushes"] += 1
        if loss := self.step in self.s.losses:
            self.lose()
        if hostile := self.step in self.s.hostile:
            self.attack()
        return bool(leaving) or flush or loss or hostile

    def _leaves(self, stream: Stream) -> bool:
        ask = stream.ask
        return (0 <= ask.abort <= len(stream.got)) or (0 <= ask.patience <= self.step - stream.came)

    def send(self, stream: Stream) -> None:
        """A new request, or the replay of one whose engine was lost."""
        ask, again = stream.ask, stream.came >= 0
        stream.came = stream.came if again else self.step
        self.open[ask.id] = stream
        self.kit.grammars.rules[ask.id] = ask.rule
        self.kit.engine.add(
            Request(
                id=ask.id,
                tokens=ask.tokens + stream.got,
                sampling=ask.sampling,
                emitted=len(stream.got),
                space=str(ask.space),
                priority=ask.priority,
                arrived=float(ask.at),
            )
        )

    def attack(self) -> None:
        """Requests that can never run are refused, and change nothing."""
        bad = [
            Request("bad", []),
            Request("bad", [1, VOCAB]),
            Request("bad", [1, -1]),
            Request("bad", [1] * self.s.max_len),
            Request("bad", [1], emitted=1),
            Request("bad", [1], Sampling(temperature=math.nan)),
            Request("bad", [1], Sampling(max_tokens=0)),
            Request("", [1]),
            *(Request(name, [1]) for name in list(self.open)[:1] if self.open[name].left < 0),
        ]
        for request in bad:
            with suppress(RequestError):
                self.kit.engine.add(request)
                raise AssertionError(f"taken: {request}")
        self.seen["refused"] += len(bad)

    def lose(self) -> None:
        """The engine process dies with its device; the front replays what it has not ended."""
        self._cover()
        self.kit = build(self.s, self.rng)
        self.free = [set() for _ in self.s.groups]
        self.ran = set()
        self.seen["losses"] += 1
        lost, self.open = list(self.open.values()), {}
        for stream in lost:
            if stream.left >= 0:
                stream.finished = "abort"
            else:
                self.send(stream)
                self.seen["replays"] += bool(stream.got)

    # ---- one turn -----------------------------------------------------------------------
    def turn(self) -> list[Output]:
        engine = self.kit.engine
        if not self.s.poll:
            return engine.step()
        while self.rng.random() < 0.8 and engine.launch():
            pass
        return engine.collect() if engine.busy and engine.ready() else []

    def hear(self, output: Output) -> None:
        stream = self.open.get(output.id)
        assert stream, f"an output for {output.id}, which is not open: {output}"
        stream.got += output.tokens
        assert stream.got == stream.want[: len(stream.got)], (
            f"{output.id}: {stream.got} is not of {stream.want}"
        )
        if output.logprobs is not None:
            assert stream.ask.sampling.logprobs is not None
            assert [p.token for p in output.logprobs] == output.tokens, output
        if output.finished is None:
            assert output.tokens, f"an empty output: {output}"
            return
        stream.finished = output.finished
        del self.open[output.id]
        self._ended(stream, output)

    def _ended(self, stream: Stream, output: Output) -> None:
        if stream.left >= 0:
            assert output.finished == "abort", f"aborted, and then {output}"
        else:
            assert output.finished == stream.why, f"{output} should end by {stream.why}"
            assert stream.got == stream.want or stream.why == "error"  # guesses before it may be lost
            assert (output.error is not None) == (stream.why == "error")
        usage = output.usage
        assert usage is not None, f"no usage: {output}"
        assert usage.prompt == len(stream.ask.tokens), usage
        assert usage.output == len(stream.got), f"{usage}, and {len(stream.got)} tokens came"
        assert 0 <= usage.cached < usage.prompt or (usage.cached == usage.prompt and self.s.losses), usage
        self.seen["preemptions"] += usage.preemptions
        self.seen["cached tokens"] += usage.cached
        assert usage.preemptions <= PREEMPTED, f"preempted {usage.preemptions} times"
        if self.s.capacity == "no-evict":
            assert usage.preemptions == 0, "no-evict preempted"

    # ---- after each turn ----------------------------------------------------------------
    def audit(self) -> None:
        kit = self.kit
        running = kit.scheduler.running
        kit.cache.check(list(running))
        self._in_turn(running)
        assert len(running) <= self.s.slots
        assert len(kit.engine.flights) <= self.s.depth
        for stream in self.open.values():
            if stream.left >= 0:
                assert stream.ask.id not in kit.scheduler.live, f"{stream.ask.id} lives on after its abort"
                assert self.s.poll or stream.left == self.step, f"{stream.ask.id} hears nothing of its abort"
        for sequence in running:
            stream = self.open.get(sequence.request.id)
            assert stream, f"{sequence.request.id} runs and is not open"
        for group in range(len(self.s.groups)):
            now = set(kit.free(group))
            if fresh := now - self.free[group]:
                kit.device.poison(group, sorted(fresh))
            self.free[group] = now
            self.seen["no free page"] += not now

    def _in_turn(self, running: list[Sequence]) -> None:
        """Who goes after another in the policy's order goes first only while that one waits for a sibling."""
        fresh = [s for s in running if s.ticket not in self.ran]
        self.ran |= {s.ticket for s in fresh}
        if self.s.policy not in RANKS or not fresh:
            return
        rank = RANKS[self.s.policy]
        last = max(map(rank, fresh))
        for waiting in self.kit.scheduler.waiting:
            if rank(waiting) < last and waiting.life == 0:
                assert waiting in self.kit.cache.blocked, f"{waiting.request.id} was overtaken"
                self.seen["waits for a sibling"] += 1

    def end(self) -> None:
        """All zero: nothing is kept for ended requests, and what the tree holds can be dropped."""
        kit = self.kit
        assert not kit.engine.busy
        assert all(t.finished for t in self.open.values())
        kit.engine.flush()
        kit.cache.check([])
        for index, group in enumerate(self.s.groups):
            assert sorted(kit.free(index)) == list(range(1, group.pages)), f"pages of group {index} are kept"
        assert kit.left() == [], f"kept at the end: {kit.left()}"

    def _cover(self) -> None:
        self.seen += self.kit.device.seen


def simulate(scenario: Scenario) -> Counter[str]:
    """Run one scenario; a fault names the line that repeats it."""
    simulation = Simulation(scenario)
    try:
        seen = simulation.run()
    except Exception as error:
        error.add_note(f"step {simulation.step}; again: python tools/sim.py --seed {scenario.seed}")
        raise
    return seen + _features(scenario)


def _features(s: Scenario) -> Counter[str]:
    """Scenarios by what they have, so that nothing is silently left out."""
    windows = sum(g.window > 0 for g in s.groups)
    names = [
        f"with depth {s.depth}",
        f"with page size {s.page_size}",
        f"with {len(s.groups)} groups, {windows} windowed",
        f"with policy {s.policy}",
        f"with capacity {s.capacity}",
        f"with {len({a.space for a in s.asks})} spaces",
        "with late results" if s.lazy else "with results at once",
    ]
    names += [f"with grammar rule {r}" for r in {a.rule for a in s.asks if a.rule}]
    names += [f"with {n}" for n in ("wire", "poll", "drafts", "hostile") if getattr(s, n)]
    names += ["with priorities"] * any(a.priority for a in s.asks) + ["with a mix"] * (s.mix is not None)
    return Counter(names)


def run_seed(seed: int) -> Counter[str]:
    return simulate(draw(seed))


def hunt(first: int, steps: int) -> Counter[str]:
    """The kept scenarios, then seeds from `first` on until so many steps are done; a fault raises."""
    seen: Counter[str] = Counter()
    for path in kept():
        seen += simulate(msgspec.json.decode(path.read_bytes(), type=Scenario))
    while seen["steps"] < steps:
        seen += run_seed(first)
        first += 1
    return seen


def kept() -> list[Path]:
    """Scenarios that once showed a fault of the core, or of a mutant that few seeds notice."""
    return sorted(Path(__file__).with_name("faults").glob("*.json"))
