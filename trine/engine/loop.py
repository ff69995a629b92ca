"""The engine process: `python -m trine.engine.loop`, started by engine/life.py.

It imports what takes long before it knows what for. Its orders come on standard input (argv is public,
and they name a secret). Then: message, launch,
collect, send, over and over in one thread, while another sends a heartbeat. It never dies of what a
message says; a step that raises ends it with the traceback sent and exit status 70, and
the face starts another one. It does not know of HTTP or of text.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from trine import log as logs
from trine.config import Config
from trine.core.messages import Abort, Answer, Beat, Command, Fatal, Ready, ToEngine, to_engine
from trine.core.stats import StepStats
from trine.core.types import Output, Request, Usage
from trine.errors import RequestError, TrineError

from . import lean, wire
from .lifeline import Lifeline

if TYPE_CHECKING:
    from .engine import Engine

ORDERS_BYTES = 1024 * 1024
BEAT_SECONDS = 0.25
STATS_SECONDS = 0.1
WAIT_SECONDS = 1.0  # for a message or a step; anything else that happened is noticed then
STUCK_SECONDS = 2 * WAIT_SECONDS  # without a turn: there is work, or should be
FRAMES_A_TURN = 64  # messages must not hold up the steps
HELLO_SECONDS = 60.0
FLUSH_SECONDS = 1.0
ERROR_CHARACTERS = 32 * 1024
FAILED = 70  # EX_SOFTWARE of sysexits.h

log = logging.getLogger(__name__)
Make = Callable[[Config, Path], "tuple[Engine, Ready]"]


def main() -> None:
    from .start import start

    gc.disable()  # until it serves: what a start makes stays
    lean.install()
    imports = threading.Thread(target=_import, name="imports", daemon=True)
    imports.start()
    try:
        run(partial(start, imports=imports))
    except SystemExit as end:  # at once: a thread in the middle of an import must not hold it up
        sys.stderr.write(f"{end}\n")
        os._exit(FAILED)


def _import() -> None:
    """What every start needs, while the orders are on their way."""
    for name in ("torch", "trine.runtime.worker", "trine.engine.engine", "trine.plan"):
        with contextlib.suppress(Exception):  # who needs it imports it again, and says what is wrong
            import_module(name)


def run(make: Make) -> None:
    """Be the engine process, with the engine that `make` makes. Does not return."""
    for name in (signal.SIGINT, signal.SIGTERM):  # the face drains first, and ends us
        signal.signal(name, signal.SIG_IGN)
    orders = _orders()
    line = Lifeline(orders.parent, Path(orders.folder))
    logs.setup(orders.config.log_level)
    link = Link(orders)
    status = FAILED
    try:
        link.hello()
        line.tie()
        serve(link, make, orders)
        status = 0
    except TrineError as error:  # what it says is enough
        refused = link.pulse.turned is None
        if not refused:  # else whoever waits for the engine says it
            log.error("the engine ends: %s", error)
        link.send([Fatal(str(error) if refused else f"{type(error).__name__}: {error}", refused)])
    except BaseException:
        log.exception("the engine ends")
        link.send([Fatal(traceback.format_exc()[-ERROR_CHARACTERS:])])
    link.close()
    logging.shutdown()
    os._exit(status)  # a compute thread that hangs must not hold us up


def serve(link: Link, make: Make, orders: wire.Orders) -> None:
    """Start the engine, say so, and step it until told to stop."""
    engine, ready = make(orders.config, Path(orders.path))
    gc.freeze()  # what the start made stays: no collection need look at it
    gc.enable()
    link.send([ready])
    Loop(engine, link).run()
    engine.executor.close()


def _orders() -> wire.Orders:
    """A length and a msgpack struct; the pipe stays open after it. Its end means a dead parent."""
    length = int.from_bytes(_read(4), "little")
    if length > ORDERS_BYTES:
        sys.exit(f"{length} bytes of orders on standard input; at most {ORDERS_BYTES}")
    return msgspec.msgpack.decode(_read(length), type=wire.Orders)


def _read(count: int) -> bytes:
    """From the descriptor itself: a buffered reader would take what is not ours."""
    data = b""
    while len(data) < count:
        if not (piece := os.read(0, count - len(data))):
            sys.exit("standard input ended before the orders were whole")
        data += piece
    return data


@dataclass(slots=True)
class Pulse:
    """What the heartbeat tells. Written by the loop, read by the beating thread."""

    step: int = 0
    busy: bool = False
    since: float = 0.0  # of the last token, or of becoming busy
    turned: float | None = None  # last turn of the loop; None: not yet serving

    def beat(self) -> Beat:
        now = time.monotonic()
        stuck = self.turned is not None and now - self.turned > STUCK_SECONDS
        busy = self.busy or stuck
        return Beat(self.step, busy, now - self.since if busy else 0.0)


@dataclass(slots=True)
class Link:
    """The sockets, seen from the engine."""

    orders: wire.Orders
    pulse: Pulse = field(default_factory=Pulse)
    reader: wire.Reader[ToEngine] = field(init=False)
    writer: wire.Writer = field(init=False)
    context: Any = field(init=False)
    inbox: Any = field(init=False)
    outbox: Any = field(init=False)
    _ended: threading.Event = field(default_factory=threading.Event)
    _beating: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = wire.Reader(self.orders.secret, to_engine)
        self.writer = wire.Writer(self.orders.secret)
        self.context = zmq.Context(io_threads=1)
        self.inbox = wire.connect(self.context, zmq.PULL, self.orders.requests)
        self.outbox = wire.connect(self.context, zmq.PUSH, self.orders.outputs)
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beating.start()

    def hello(self) -> None:
        """Wait for the first message: the face is connected both ways and has removed the names."""
        while self.inbox.poll(int(HELLO_SECONDS * 1000)):
            if self.reader.take(self.inbox.recv()):
                return
        raise TimeoutError(f"the face said nothing for {HELLO_SECONDS:.0f} s")

    def send(self, messages: list[Any]) -> None:
        """Waits if the face does not read: its memory is bounded, and so is ours."""
        for frame in self.writer.frames(messages):
            self.outbox.send(frame)

    def close(self) -> None:
        self._ended.set()
        self._beating.join()
        self.context.destroy(linger=int(FLUSH_SECONDS * 1000))

    def _beat(self) -> None:
        """With a socket of its own: zmq sockets belong to one thread."""
        socket = wire.connect(self.context, zmq.PUSH, self.orders.outputs)
        while True:
            with contextlib.suppress(zmq.Again):  # the face does not read: it would not read this one
                socket.send(self.writer.loose(self.pulse.beat()), zmq.NOBLOCK)
            if self._ended.wait(BEAT_SECONDS):
                return socket.close(0)


class Loop:
    """Turns until told to stop."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self.engine, self.link, self.pulse = engine, link, link.pulse
        self.stopped = False
        self._fresh: set[str] = set()  # requests of which nothing was told yet
        self._refused: list[Output] = []  # requests that the engine did not take
        self._told, self._owed = 0.0, False  # when StepStats were last sent; was there a step since
        self._woken, self._wake = socket.socketpair()  # a step's result rings it, from any thread
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(link.inbox, zmq.POLLIN)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        engine.executor.on_done(self._ring)

    def run(self) -> None:
        while not self.stopped:
            self.turn()

    def turn(self) -> None:
        """Messages in, a step out; sleeps only if there is neither."""
        self._quiet()
        self._receive()
        launched = self.engine.launch()
        outputs: list[Output] = []
        if ready := self.engine.ready():
            outputs = self.engine.collect()
            self.pulse.step += 1
            self._owed = True
        self._feel(any(output.tokens for output in outputs))
        messages = [*self._refused, *map(self._first, outputs), *self._stats()]
        self._refused.clear()
        if messages:
            self.link.send(messages)
        elif not (launched or ready or self.stopped):
            self._poller.poll(int(1000 * (STATS_SECONDS if self._owed else WAIT_SECONDS)))
            self._feel(False)

    def _first(self, output: Output) -> Output:
        """A request's first output tells its counts too: should this engine die, nobody else knows
        what was found in its cache."""
        if output.id not in self._fresh:
            return output
        self._fresh.discard(output.id)
        if output.finished or not (seq := self.engine.scheduler.live.get(output.id)):
            return output
        usage = Usage(seq.request.prompt, seq.cached, len(output.tokens), seq.life)
        return msgspec.structs.replace(output, usage=usage)

    def _feel(self, token: bool) -> None:
        """For the next beat."""
        now, busy = time.monotonic(), self.engine.busy
        if token or (busy and not self.pulse.busy):
            self.pulse.since = now
        self.pulse.busy, self.pulse.turned = busy, now

    def _stats(self) -> list[StepStats]:
        """At most ten a second; the last step of all is told too, a moment later."""
        now = time.monotonic()
        if not self._owed or now - self._told < STATS_SECONDS:
            return []
        self._told, self._owed = now, False
        return [self.engine.stats()]

    # ---- messages -----------------------------------------------------------------------
    def _receive(self) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                frame = self.link.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for message in self.link.reader.take(frame):
                self._take(message)

    def _take(self, message: ToEngine) -> None:
        match message:
            case Request():
                self._add(message)
            case Abort(ids):
                for id in ids:
                    self.engine.abort(id)
            case Command():
                self.link.send([self._answer(message)])

    def _add(self, request: Request) -> None:
        """Rule S2: whatever a request holds, it can only fail itself."""
        try:
            self.engine.add(request)
            self._fresh.add(request.id)
        except RequestError as error:
            self._refused.append(Output(request.id, [], finished="error", error=str(error)))
        except Exception:
            log.exception("a request could not be added")
            self._refused.append(
                Output(request.id, [], finished="error", error="the request could not be added")
            )

    def _answer(self, command: Command) -> Answer:
        match command.name:
            case "flush":
                self.engine.flush()
                return Answer(command.ticket)
            case "stats":
                return Answer(command.ticket, msgspec.to_builtins(self.engine.stats()))
            case "stop":
                self.stopped = True
                return Answer(command.ticket)
            case name:
                return Answer(command.ticket, error=f"no command is called {name[:64]!r}")

    # ---- waking -------------------------------------------------------------------------
    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._wake.send(b"!")

    def _quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass


if __name__ == "__main__":
    main()
