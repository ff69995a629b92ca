"""The engine as everybody else sees it: submit a request, iterate over its outputs.

It runs the engine in a process of its own, starts a new one when that dies or freezes, and lets the
live requests go on where their clients left off (engine/replay.py says which, and when). It never imports
torch, and does not know of text or HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec
import zmq.asyncio
from msgspec import Struct

from trine.config import Config
from trine.core.messages import FRAME_BYTES, Abort, Answer, Command, FromEngine, Ready
from trine.core.stats import StepStats
from trine.core.types import Output, Request
from trine.errors import EngineDead, Overloaded, RequestError
from trine.log import StatsLine

from .folder import RunFolder
from .life import Death, Life, Limits
from .replay import Replay
from .spawn import COMMAND
from .stream import Stream

SEED_BITS = 63
ID_CHARACTERS = 64
TOKEN_BYTES = 5  # of one token id in a frame, at most
FINISHES = 64  # finished requests from which the rate is taken
WAIT_SECONDS = (1.0, 60.0)  # bounds of what an overloaded client is told
COUNTERS = (
    "step", "prompt_tokens", "hit_tokens", "computed_tokens", "output_tokens", "preemptions", "finished",
    "aborted", "idle_seconds",
)  # fmt: skip

log = logging.getLogger(__name__)


class Health(Struct, frozen=True):
    """Progress, not liveness. `reason` says what is wrong, or "serving"."""

    ok: bool
    reason: str
    step: int = 0  # since the first start
    beat: float = 0.0  # seconds without a heartbeat
    idle: float = 0.0  # seconds without a token although there is work
    restarts: int = 0


class Counts(Struct, frozen=True):
    """What went wrong so far; all counters."""

    restarts: int = 0
    poisoned: int = 0  # requests given up because the engine failed on them alone
    bad_frames: int = 0
    repeated_frames: int = 0
    late_outputs: int = 0


class Listener(Protocol):
    """Who wants to hear of the engine's numbers: `metrics.Metrics` does."""

    def started(self, ready: Ready) -> None: ...
    def step(self, stats: StepStats) -> None: ...
    def engine(self, counts: Counts) -> None: ...


class EngineClient:
    """Start it, submit, close it. One event loop, on a thread that lives as long as the engine.

    `process`: the first engine's, if it was spawned already and waits for its orders."""

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        command: tuple[str, ...] = COMMAND,
        limits: Limits = Limits(),
        listener: Listener | None = None,
        folder: RunFolder | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.folder = folder or RunFolder()
        self._config, self._path, self._command, self._limits = config, path, command, limits
        self._process = process
        self._listener, self._line = listener, StatsLine()
        self._replay = Replay()
        # By the engine's name. Names are never used again, so what an engine still says of a
        # request that was left cannot reach a later one of the same id.
        self._streams: WeakValueDictionary[str, Stream] = WeakValueDictionary()
        self._names: dict[str, str] = {}  # a client's id -> what the engine calls the request
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tickets = itertools.count(1)
        self._finishes: deque[float] = deque(maxlen=FINISHES)
        self._before, self._steps = StepStats(), 0  # counters of the lives that are over
        self._stats = StepStats()
        self._counts = Counts()
        self._state = "not started"
        self._context: Any = None
        self._ready: Ready | None = None
        self._life: Life | None = None
        self._starting: asyncio.Task[Ready] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._dead: EngineDead | None = None
        self._ended = asyncio.Event()

    # ---- what it is asked ---------------------------------------------------------------
    async def start(self) -> Ready:
        """The first engine. If it cannot start, neither could a second one: EngineDead says why. Whoever
        asks again waits for the same one."""
        self._starting = self._starting or asyncio.create_task(self._start())
        try:
            return await asyncio.shield(self._starting)
        except BaseException:
            await self.close()
            raise

    def submit(self, request: Request) -> Stream:
        """Its outputs, as an async iterator; leaving it aborts the request at once.

        RequestError, Overloaded or EngineDead at once if it cannot be taken at all."""
        self._check(request)
        if request.sampling.seed is None:  # drawn here, so that a replay has the same
            sampling = msgspec.structs.replace(request.sampling, seed=secrets.randbits(SEED_BITS))
            request = msgspec.structs.replace(request, sampling=sampling)
        name = f"{next(self._tickets):x}-{request.id}"[:ID_CHARACTERS]
        stream = Stream(request.id, name, self._left)
        self._names[stream.id] = stream.name
        self._streams[stream.name] = stream
        self._replay.add(msgspec.structs.replace(request, id=stream.name))
        self._send_due()
        return stream

    def abort(self, id: str) -> None:
        """Its stream still ends with an Output, "abort"; ids that are not live are ignored."""
        record = self._replay.records.get(name := self._names.get(id, ""))
        if record is None or record.aborted:
            return
        record.aborted = True
        if record.inside and self._life:
            self._life.send(Abort([name]))
        else:
            self._end(name)

    async def command(self, name: str, **values: Any) -> Any:
        """Something rare: "flush" or "stats". RequestError with the engine's words if it refuses."""
        if self._state != "serving" or not self._life:
            raise EngineDead(f"the engine is {self._state}")
        ticket = next(self._tickets)
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        self._life.send(Command(ticket, name, values))
        try:
            return await answer
        finally:
            self._answers.pop(ticket, None)

    async def close(self) -> None:
        """Ask the engine to stop, then make it. Streams that are still open end with "abort"."""
        self._state = "closed"
        for task in (self._starting, self._keeper):
            if task:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._life:
            await self._life.end()
        for name in list(self._replay.records):
            self._end(name)
        self._fail_answers("the engine was stopped")
        if self._context:
            self._context.destroy(linger=0)
        self.folder.close()
        self._ended.set()

    # ---- what it knows ------------------------------------------------------------------
    @property
    def ready(self) -> Ready | None:
        """What the engine said of itself; None until the first one can serve."""
        return self._ready

    @property
    def stats(self) -> StepStats:
        """The latest; its counters go on growing when an engine is replaced."""
        return self._stats

    @property
    def counts(self) -> Counts:
        reader = self._life.reader if self._life else None
        return msgspec.structs.replace(
            self._counts,
            poisoned=self._replay.poisoned,
            late_outputs=self._replay.late,
            bad_frames=self._counts.bad_frames + (reader.bad if reader else 0),
            repeated_frames=self._counts.repeated_frames + (reader.repeated if reader else 0),
        )

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._replay.records)

    @property
    def waiting(self) -> int:
        """Of those, how many are in no step yet: what the engine last said, or more if we know better."""
        rows = self._ready.max_num_seqs if self._ready else 0
        return max(min(self._stats.waiting, self.live), self.live - rows)

    @property
    def retry_after(self) -> float:
        """Seconds until one who is turned away now would find a place, at the rate of the last minutes."""
        low, high = WAIT_SECONDS
        if len(self._finishes) < 2:
            return low
        each = (time.monotonic() - self._finishes[0]) / len(self._finishes)
        return min(high, max(low, each * max(1, self.live - self._room + 1)))

    @property
    def health(self) -> Health:
        life, limits = self._life, self._limits
        if self._state != "serving" or not life:
            return Health(False, self._state, self._steps, restarts=self._counts.restarts)
        reason = "serving"
        if life.death.done():
            reason = "the engine died"
        elif life.silence > limits.silent:
            reason = f"no heartbeat for {life.silence:.1f} s"
        elif life.still > limits.slow:
            reason = f"no step for {life.still:.0f} s although there is work"
        return Health(
            reason == "serving",
            reason,
            step=self._steps + life.beat.step,
            beat=round(life.silence, 3),
            idle=life.beat.idle,
            restarts=self._counts.restarts,
        )

    async def ended(self) -> EngineDead | None:
        """Waits until there will be no engine any more: closed (None), or given up."""
        await self._ended.wait()
        return self._dead

    # ---- requests -----------------------------------------------------------------------
    @property
    def _room(self) -> int:
        return (self._ready.max_num_seqs if self._ready else 0) + self._config.max_queue

    def _check(self, request: Request) -> None:
        if self._dead:
            raise self._dead
        if self._state in ("closed", "not started"):
            raise EngineDead(f"the engine is {self._state}")
        if request.id in self._names:
            raise RequestError(f"the request id {request.id!r} is in use")
        if len(request.tokens) * TOKEN_BYTES > FRAME_BYTES // 2:
            raise RequestError(f"{len(request.tokens)} tokens are more than a message holds", status=413)
        if self.live >= self._room:
            raise Overloaded(f"{self.live} requests are live, the queue is full", self.retry_after)

    def _send_due(self) -> None:
        alive = self._state == "serving" and self._life and not self._life.death.done()
        if alive and self._life and (due := self._replay.due()):
            self._life.send(*due)

    def _tell(self, output: Output) -> None:
        if stream := self._streams.get(output.id):
            stream.feed(output)
            if output.finished:
                self._forget(stream)
                self._finishes.append(time.monotonic())

    def _end(self, name: str) -> None:
        """Here and now, without the engine."""
        if record := self._replay.drop(name):
            self._tell(Output(name, [], finished="abort", usage=record.usage()))

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.name, None)
        if self._names.get(stream.id) == stream.name:
            del self._names[stream.id]

    def _left(self, stream: Stream) -> None:
        """Its reader is gone."""
        self._forget(stream)
        record = self._replay.drop(stream.name)
        if record and self._life and record.inside:
            self._life.send(Abort([stream.name]))
        self._send_due()  # it may have been what others waited for

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Output():
                if output := self._replay.take(message):
                    self._tell(output)
                self._send_due()
            case StepStats():
                self._note(_sum(self._before, message))
            case Answer(ticket, value, error):
                if (answer := self._answers.get(ticket)) and not answer.done():
                    answer.set_exception(RequestError(error)) if error else answer.set_result(value)

    def _note(self, stats: StepStats) -> None:
        self._stats = stats
        self._line.feed(stats)
        if self._listener:
            self._listener.step(stats)
            self._listener.engine(self.counts)

    # ---- lives --------------------------------------------------------------------------
    async def _start(self) -> Ready:
        self._context = zmq.asyncio.Context()
        self._state = "starting"
        ready = await self._begin()
        self._keeper = asyncio.create_task(self._keep())
        return ready

    async def _begin(self) -> Ready:
        """One engine process, up to its being ready."""
        self._life = life = Life(self._context, self.folder.path, self._limits, self._hear)
        process, self._process = self._process, None
        self._ready = ready = await life.start(self._config, self._path, self._command, process)
        self._state = "serving"
        if self._listener:
            self._listener.started(ready)
        self._send_due()
        return ready

    async def _keep(self) -> None:
        """Whenever the engine is over, bury it and begin another."""
        while self._life:
            death = await asyncio.shield(self._life.death)
            log.error("%s; starting another engine, %d requests go on", death.reason, self.live)
            try:
                await self._bury(self._life, death)
                await self._revive()
            except Exception as error:
                dead = (
                    error if isinstance(error, EngineDead) else EngineDead(f"{type(error).__name__}: {error}")
                )
                return self._give_up(dead)

    async def _bury(self, life: Life, death: Death) -> None:
        self._state = "restarting"
        await life.kill()
        self._fail_answers(death.reason)
        self._counts = msgspec.structs.replace(
            self._counts,
            restarts=self._counts.restarts + 1,
            bad_frames=self._counts.bad_frames + life.reader.bad,
            repeated_frames=self._counts.repeated_frames + life.reader.repeated,
        )
        self._life = None
        for output in self._replay.died(death.blamed):
            self._tell(output)
        self._steps += life.beat.step
        self._before = _sum(self._stats, StepStats(waiting=self.live))
        self._note(self._before)
        if self._replay.barren >= self._limits.barren_deaths:
            raise EngineDead(
                f"{self._replay.barren} engines in a row died without a token; the last: {death}"
            )

    async def _revive(self) -> None:
        for attempt in range(1, self._limits.failed_starts + 1):
            try:
                await self._begin()
                return
            except Exception as error:  # no memory, no descriptors: that may pass
                log.error("start %d of %d failed: %s", attempt, self._limits.failed_starts, error)
                if self._life:
                    await self._life.kill()
                if attempt == self._limits.failed_starts:
                    raise
                await asyncio.sleep(self._limits.back_off * 2 ** (attempt - 1))

    def _give_up(self, error: EngineDead) -> None:
        log.critical("no engine any more: %s", error)
        self._state, self._dead = "dead", error
        for id in list(self._replay.records):
            self._replay.drop(id)
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        self._names.clear()
        self._ended.set()

    def _fail_answers(self, reason: str) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))


def _sum(before: StepStats, now: StepStats) -> StepStats:
    """The moment of `now`, the counters of both."""
    return msgspec.structs.replace(
        now, **{name: getattr(before, name) + getattr(now, name) for name in COUNTERS}
    )
