"""One engine process seen from outside: spawned, met, listened to, and ended.

It knows when the process is dead, frozen or stuck, and how to make an end of it, but not what
to do then, nor what a request is: engine/client.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from trine.config import Config
from trine.core.messages import Beat, Command, Fatal, FromEngine, Ready, from_engine
from trine.errors import EngineDead

from . import wire
from .spawn import COMMAND, spawn

LINE_BYTES = 4096
LAST_LINES = 40
KILL_SECONDS = 10.0
DRAIN_TURNS, DRAIN_SECONDS = 25, 0.02  # for what the process said before it died

CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}  # its own doing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds, unless it says otherwise. Silence counts only while the face itself is listening."""

    tick: float = 0.05  # how often the process is looked at
    silent: float = 1.5  # without a heartbeat (4 a second): not healthy
    frozen: float = 10.0  # without a heartbeat: dead
    slow: float = 60.0  # with work and without a step: not healthy
    stalled: float = 300.0  # with work and without a step: dead
    start: float = 1800.0  # from spawn to ready: a large model on a slow disk
    stop: float = 5.0  # from asking to killing
    back_off: float = 0.25  # before the second start in a row, then doubled
    failed_starts: int = 5  # starts in a row that fail before it is given up
    barren_deaths: int = 24  # deaths in a row without a token before it is given up


@dataclass(frozen=True, slots=True)
class Death:
    """Why an engine process is over."""

    reason: str
    blamed: bool  # it failed by itself: what it was doing may be the cause
    said: str  # its traceback, or its last lines

    def __str__(self) -> str:
        return f"{self.reason}\n{self.said}".strip()


class Life:
    """From spawn to end. `hear` gets all that the engine says but Beat, Ready and Fatal."""

    def __init__(
        self,
        context: Any,  # zmq.asyncio.Context
        folder: Path,
        limits: Limits,
        hear: Callable[[FromEngine], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.death: asyncio.Future[Death] = loop.create_future()
        self.beat = Beat(0, False, 0.0)
        self.silence = 0.0  # seconds listened to without hearing anything
        self.still = 0.0  # seconds with work and without a step
        self.frames = 0
        self._limits, self._hear, self._context = limits, hear, context
        self._secret = secrets.token_bytes(wire.SECRET_BYTES)
        self.reader = wire.Reader(self._secret, from_engine)
        self._writer = wire.Writer(self._secret)
        self._names = [folder / secrets.token_hex(16) for _ in range(2)]
        self._folder = folder
        self._fatal: str | None = None
        self._refused = False
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._outgoing: list[Any] = []
        self._work, self._met = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.process: subprocess.Popen[bytes] | None = None

    async def start(
        self,
        config: Config,
        path: Path,
        command: tuple[str, ...] = COMMAND,
        process: subprocess.Popen[bytes] | None = None,
    ) -> Ready:
        """Tell `process`, or a new one, its orders, and wait until it can serve; EngineDead with its own
        words if it never can. On a thread that lives as long as the engine should: see `spawn`."""
        requests, outputs = self._names
        self._requests = wire.bind(self._context, zmq.PUSH, requests)
        self._outputs = wire.bind(self._context, zmq.PULL, outputs)
        self.process = process or spawn(command)
        self._order(self.process, config, path)
        self._tasks = [asyncio.create_task(work()) for work in (self._listen, self._send, self._watch)]
        try:
            async with asyncio.timeout(self._limits.start):
                await asyncio.wait((self.ready, self.death), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self._over(f"the engine was not ready after {self._limits.start:.0f} s", False)
        if self.death.done():
            death = self.death.result()
            raise EngineDead(death.said if self._refused else str(death))
        return self.ready.result()

    def send(self, *messages: Any) -> None:
        """In order; what does not fit in the socket waits here."""
        self._outgoing += messages
        self._work.set()

    async def end(self) -> None:
        """Ask it to stop, then make it; nothing of it is left afterwards."""
        if self.process and self.process.poll() is None and self.ready.done():
            self.send(Command(0, "stop"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.stop):
                    await asyncio.wait([self.death])
        await self.kill()

    async def kill(self) -> None:
        """At once, with its children. Safe to call twice."""
        self._over("the engine process was ended", False)
        process, deadline = self.process, time.monotonic() + KILL_SECONDS
        while process and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
            if time.monotonic() > deadline:  # it hangs in the kernel, where no signal reaches it
                log.critical("the engine process %d cannot be ended", process.pid)
                break
        if process and process.stdin:
            process.stdin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for socket in (getattr(self, "_requests", None), getattr(self, "_outputs", None)):
            if socket:
                socket.close(0)
        self._forget_names()

    # ---- the process --------------------------------------------------------------------
    def _order(self, process: subprocess.Popen[bytes], config: Config, path: Path) -> None:
        orders = wire.Orders(
            config=msgspec.structs.replace(config, api_key=()),
            path=str(path.resolve()),
            parent=os.getpid(),
            folder=str(self._folder),
            requests=str(self._names[0]),
            outputs=str(self._names[1]),
            secret=self._secret,
        )
        body = msgspec.msgpack.encode(orders)
        with contextlib.suppress(BrokenPipeError):  # its last lines will say why
            assert process.stdin
            process.stdin.write(len(body).to_bytes(4, "little") + body)
            process.stdin.flush()
        threading.Thread(
            target=_forward, args=(process.stdout, self._lines), name="engine output", daemon=True
        ).start()

    def _forget_names(self) -> None:
        for name in self._names:
            name.unlink(missing_ok=True)

    # ---- tasks --------------------------------------------------------------------------
    async def _send(self) -> None:
        """First, when it is connected both ways, take the names away and say so."""
        await self._met.wait()
        await self._requests.poll(flags=zmq.POLLOUT)
        self._forget_names()
        self._outgoing.insert(0, Command(0, "hello"))
        while True:
            outgoing, self._outgoing = self._outgoing, []
            for frame in self._writer.frames(outgoing) if outgoing else ():
                await self._requests.send(frame)
            if not self._outgoing:
                self._work.clear()
                await self._work.wait()

    async def _listen(self) -> None:
        while True:
            for message in self.reader.take(await self._outputs.recv()):
                self.silence = 0.0
                match message:
                    case Beat(step):
                        self.still *= step == self.beat.step
                        self.beat = message
                        self._met.set()
                    case Ready():
                        if not self.ready.done():
                            self.ready.set_result(message)
                    case Fatal(error, refused):
                        self._fatal, self._refused = error, refused
                    case _:
                        self._told(message)
            self.frames += 1

    def _told(self, message: FromEngine) -> None:
        try:
            self._hear(message)
        except Exception:  # one stream's trouble must not end all the others
            log.exception("a message of the engine could not be handled")

    async def _watch(self) -> None:
        """Until it is over. Time counts by ticks: when our own loop was held up, the engine is not to blame."""
        last = time.monotonic()
        while not self.death.done():
            await asyncio.sleep(self._limits.tick)
            now = time.monotonic()
            passed, last = min(now - last, 2 * self._limits.tick), now
            self.silence += passed
            self.still = self.still + passed if self.beat.busy else 0.0
            await self._look()

    async def _look(self) -> None:
        limits = self._limits
        if self.process and (status := self.process.poll()) is not None:
            await self._drain()
            blamed = self._fatal is not None or -status in CRASHES
            self._over(f"the engine process ended with {_status(status)}", blamed)
        elif self.reader.lost:
            self._over("a message of the engine was lost", False)
        elif self.ready.done() and self.silence > limits.frozen:
            self._over(f"the engine sent no heartbeat for {limits.frozen:.0f} s", False)
        elif self.ready.done() and self.still > limits.stalled:
            self._over(f"the engine had work and made no step for {limits.stalled:.0f} s", True)

    async def _drain(self) -> None:
        """Read what it said before it died."""
        for _ in range(DRAIN_TURNS):
            before = self.frames
            await asyncio.sleep(DRAIN_SECONDS)
            if self.frames == before:
                return

    def _over(self, reason: str, blamed: bool) -> None:
        if not self.death.done():
            self.death.set_result(Death(reason, blamed, self._fatal or "\n".join(self._lines)))


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _forward(pipe: Any, lines: deque[str]) -> None:
    """A thread: what the process prints goes to our own standard error; the last lines are kept."""
    for line in iter(lambda: pipe.readline(LINE_BYTES), b""):
        text = line.decode("utf-8", "replace")
        lines.append(text.rstrip())
        with contextlib.suppress(OSError, ValueError):  # ours may be closed
            sys.stderr.write(text)
    pipe.close()
