"""An engine process without torch, for tests of what stands around it: run as a script.

The engine inside is a stand-in with the real one's doors, or with --core the real one over the fake
device. The next token is a hash of all before it, so a token that is missing or twice changes
the rest. Prompts can ask for trouble: see `Trouble`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trine.config import Config
from trine.core.messages import Ready
from trine.core.stats import StepStats
from trine.core.types import Output, Request, Usage
from trine.engine import loop
from trine.errors import ConfigError, RequestError

VOCAB = 50_000
ROWS = 64


class Trouble:
    """Token ids that a prompt may hold; the trouble comes when the output is `at` tokens long."""

    RAISE, SIGNAL, FREEZE, STALL = range(VOCAB - 4, VOCAB)
    at = 3


def token(history: list[int], seed: int | None) -> int:
    """The next one. The last ids are kept for trouble."""
    return hash((seed, *history)) % (VOCAB - 100)


def solo(request: Request) -> list[int]:
    """All that a request gives alone."""
    history = list(request.tokens)
    while len(history) < len(request.tokens) + request.sampling.max_tokens:
        history.append(token(history, request.sampling.seed))
    return history[len(request.tokens) :]


class Executor:
    """One compute thread that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[Callable[[], None]] = []
        self.steps: queue.Queue[list[Sequence] | None] = queue.Queue()
        self.results: queue.Queue[list[tuple[Sequence, int]] | Exception] = queue.Queue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while (rows := self.steps.get()) is not None:
            time.sleep(self.seconds)
            try:
                self.results.put([(row, row.compute()) for row in rows])
            except Exception as error:
                self.results.put(error)
            for call in self.calls:
                call()

    def on_done(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def close(self) -> None:
        self.steps.put(None)


class Sequence:
    life = 0

    def __init__(self, request: Request) -> None:
        self.request, self.tokens = request, list(request.tokens)
        self.cached = 0 if request.emitted else 1  # a new engine finds nothing

    @property
    def made(self) -> int:
        return len(self.tokens) - self.request.prompt

    def compute(self) -> int:
        if self.made >= Trouble.at:
            if Trouble.RAISE in self.request.tokens:
                raise FloatingPointError("not a number in the logits")
            if Trouble.SIGNAL in self.request.tokens:
                os.kill(os.getpid(), signal.SIGSEGV)
            if Trouble.FREEZE in self.request.tokens:
                os.kill(os.getpid(), signal.SIGSTOP)
            if Trouble.STALL in self.request.tokens:
                threading.Event().wait()
        return token(self.tokens, self.request.sampling.seed)


class Engine:
    """The doors of trine.engine.engine.Engine."""

    def __init__(self, seconds: float) -> None:
        self.executor = Executor(seconds)
        self.scheduler = self
        self.live: dict[str, Sequence] = {}
        self.ended: list[Output] = []
        self.flying = False
        self.steps = self.prompt = self.out = self.finished = self.aborted = 0

    def add(self, request: Request) -> None:
        if not request.tokens or max(request.tokens) >= VOCAB or min(request.tokens) < 0:
            raise RequestError("a token id is outside the vocabulary")
        if request.sampling.temperature != request.sampling.temperature:
            raise RequestError("temperature is not a number")
        if request.id in self.live:
            raise RequestError("the id is in use")
        if request.id.endswith("-bug"):
            raise KeyError("a bug")
        self.live[request.id] = Sequence(request)
        self.prompt += request.prompt

    def abort(self, id: str) -> None:
        if sequence := self.live.pop(id, None):
            self.aborted += 1
            self.ended.append(Output(id, [], "abort", usage=self.usage(sequence)))

    @property
    def busy(self) -> bool:
        return bool(self.live or self.ended or self.flying)

    def launch(self) -> bool:
        if self.flying or not self.live:
            return False
        self.executor.steps.put(list(self.live.values())[:ROWS])
        self.flying = True
        return True

    def ready(self) -> bool:
        return not self.executor.results.empty() if self.flying else bool(self.ended)

    def collect(self) -> list[Output]:
        outputs, self.ended = self.ended, []
        if self.flying:
            self.flying = False
            self.steps += 1
            if isinstance(result := self.executor.results.get(), Exception):
                raise result
            outputs += [self.commit(s, t) for s, t in result if s.request.id in self.live]
        return outputs

    def commit(self, sequence: Sequence, new: int) -> Output:
        sequence.tokens.append(new)
        self.out += 1
        id = sequence.request.id
        if sequence.made < sequence.request.sampling.max_tokens:
            return Output(id, [new])
        del self.live[id]
        self.finished += 1
        return Output(id, [new], "length", usage=self.usage(sequence))

    def usage(self, sequence: Sequence) -> Usage:
        return Usage(sequence.request.prompt, sequence.cached, sequence.made)

    def flush(self) -> None: ...

    def stats(self) -> StepStats:
        return StepStats(
            step=self.steps,
            running=min(ROWS, len(self.live)),
            waiting=max(0, len(self.live) - ROWS),
            pages=100,
            held=len(self.live),
            prompt_tokens=self.prompt,
            output_tokens=self.out,
            computed_tokens=self.prompt + self.out,
            finished=self.finished,
            aborted=self.aborted,
        )


def core(seconds: float) -> tuple[object, Ready]:
    """The real cache, scheduler, engine and compute thread; a small pool, so that it is fought for."""
    from tests.kit.engine import fake_kit
    from tests.kit.fake import VOCAB as KNOWN
    from tests.kit.fake import FakeExecutor
    from trine.core.types import Batch, Group
    from trine.executor.local import LocalExecutor

    class Device(FakeExecutor):
        def forward(self, batch: Batch) -> None:
            time.sleep(seconds)
            super().forward(batch)
            for place in map(self.places.__getitem__, (row.slot for row in batch.rows)):
                if (
                    CORE_POISON in place.tokens[: place.prompt]
                    and len(place.tokens) > place.prompt + Trouble.at
                ):
                    raise FloatingPointError("not a number in the logits")

    rows, pages, length = 16, 96, 512
    kit = fake_kit(groups=[Group(pages)], page_size=8, slots=rows, budget=64, max_len=length, depth=2)
    device = Device([Group(pages)], 8, rows, length)
    engine = kit.engine
    engine.executor, engine.vocab = LocalExecutor(lambda: device), KNOWN + 1
    return engine, Ready(os.getpid(), "core", KNOWN, [], length, rows, 8, pages - 1, [])


CORE_POISON = 50  # an id that the fake model never chooses


def hold_the_interpreter(seconds: int) -> None:
    """As a library does that is being imported: no other thread of Python runs."""
    ctypes.PyDLL(None).sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", type=float, default=0.002, help="seconds of a step")
    parser.add_argument("--phase", default="", help="hold: the start hangs in C; refuse: ConfigError; crash")
    parser.add_argument("--broken", type=Path, help="a file: starts crash while it exists")
    parser.add_argument("--core", action="store_true")
    given = parser.parse_args()

    def make(config: Config, path: Path) -> tuple[Engine, Ready]:
        phase = "crash" if given.broken and given.broken.exists() else given.phase
        print("phase:", phase or "serve", flush=True)
        match phase:
            case "hold":
                hold_the_interpreter(60)
            case "refuse":
                raise ConfigError("this model is too big; ask for a smaller one")
            case "crash":
                raise RuntimeError(f"no start with {len(config.api_key)} keys")
        if given.core:
            return core(given.step)  # type: ignore[return-value]
        return Engine(given.step), Ready(os.getpid(), "stand-in", VOCAB, [0], 4096, ROWS, 16, 100, [])

    loop.run(make)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
