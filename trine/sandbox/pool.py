"""The parent's side of the sandbox: a few children, calls in turn, and a fresh child after harm.

Each thread of a small executor owns the children it starts, because the kernel ties a child to
the *thread* that started it; the executor's queue is the fairness: first come, first served.
Knows nothing of what the tasks do.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from ..errors import TrineError
from .frame import HEAD, Call, Reply, TooLong, length, pack

START = 60.0  # seconds a child may take to start on a busy machine
CHUNK = 1 << 20  # bytes read at a time
SPENT = {signal.SIGPROF, signal.SIGXCPU, signal.SIGVTALRM}  # how a child ends whose CPU time is used up


class SandboxError(TrineError):
    """A task in the sandbox did not give an answer."""


class Exceeded(SandboxError):
    """A budget was blown. `what` is cpu, wall, memory or answer."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class Failed(SandboxError):
    """The task raised, or its child died. `kind` is the exception's name, or "crash"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Died(Exception):
    """A child's pipe closed."""


class Sandbox:
    """A pool of children for untrusted programs.

        with Sandbox() as sandbox:
            sandbox.call("gguf.header", "/models/some.gguf", cpu=10, memory=1 << 29)

    Children are started by the first calls, or by `warm`. `preload` names tasks whose modules a
    child imports at its start.
    """

    def __init__(self, size: int = 2, preload: tuple[str, ...] = ()) -> None:
        self._size = size
        self._preload = preload
        self._threads = ThreadPoolExecutor(size, "sandbox")
        self._idle: list[Child] = []
        self._end = weakref.finalize(self, close_all, self._threads, self._idle)

    def call(
        self,
        task: str,
        payload: Any,
        *,
        cpu: float = 0.25,
        wall: float = 5.0,
        memory: int = 64 << 20,
        answer: int = 64 << 20,
    ) -> Any:
        """Run `task` and wait. Seconds of CPU and of the clock, bytes of memory and of the
        answer; Exceeded or Failed if it gave none. The clock starts when a child is there."""
        return self._submit(Call(task, payload, cpu, memory, answer), wall).result()

    async def acall(
        self,
        task: str,
        payload: Any,
        *,
        cpu: float = 0.25,
        wall: float = 5.0,
        memory: int = 64 << 20,
        answer: int = 64 << 20,
    ) -> Any:
        """`call` for an event loop, which goes on meanwhile."""
        return await asyncio.wrap_future(self._submit(Call(task, payload, cpu, memory, answer), wall))

    def warm(self) -> None:
        """Start every child and wait until all can serve."""
        starts = [self._threads.submit(take, [], self._preload) for _ in range(self._size - len(self._idle))]
        for start in starts:
            self._idle.append(start.result())

    def close(self) -> None:
        """End the children; calls that wait are cancelled."""
        self._end()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are free now."""
        return [child.process.pid for child in self._idle]

    def _submit(self, call: Call, wall: float) -> Future[Any]:
        try:
            data = pack(call, 64 << 20)
        except TooLong as error:
            raise Exceeded("payload", f"the input of {call.task} is too long: {error}") from None
        return self._threads.submit(run, self._idle, self._preload, data, call, wall)


def run(idle: list[Child], preload: tuple[str, ...], data: bytes, call: Call, wall: float) -> Any:
    """One call in a child of `idle`, or in a new one; runs in a thread of the executor."""
    child = take(idle, preload)
    try:
        reply = child.exchange(data, call.answer, wall)
    except BaseException as error:
        child.kill()
        idle.append(Child(preload))  # starts while nobody waits for it yet
        raise trouble(error, child, call, wall) from None
    if reply.last:
        child.kill()
        idle.append(Child(preload))
    else:
        idle.append(child)
    if reply.kind in ("memory", "answer"):
        used = f"{call.memory >> 20} MiB of memory" if reply.kind == "memory" else reply.message
        raise Exceeded(reply.kind, f"{call.task} used more than its budget: {used}")
    if reply.kind:
        raise Failed(reply.kind, reply.message)
    return reply.value


def take(idle: list[Child], preload: tuple[str, ...]) -> Child:
    """A child that can serve: a free one that lives, or a new one."""
    while idle:
        if (child := idle.pop()).process.poll() is None:
            with suppress(Died, TimeoutError):
                child.wait_ready()
                return child
        child.kill()
    child = Child(preload)
    try:
        child.wait_ready()
    except (Died, TimeoutError):
        raise Failed("crash", f"a sandbox child did not start: status {child.kill()}, {child.last}") from None
    return child


def trouble(error: BaseException, child: Child, call: Call, wall: float) -> BaseException:
    """What to raise for a call that got no answer, from how its child ended."""
    match error:
        case Died() if -child.process.returncode in SPENT:
            return Exceeded("cpu", f"{call.task} used more than its budget: {call.cpu:g} s of CPU time")
        case Died():
            how = f"status {child.process.returncode}: {child.last}"
            return Failed("crash", f"the child that ran {call.task} died with {how}")
        case TimeoutError():
            return Exceeded("wall", f"{call.task} used more than its budget: {wall:g} s")
        case TooLong():
            return Exceeded("answer", f"the answer of {call.task} is too long: {error}")
        case msgspec.DecodeError():
            return Failed("crash", f"the child that ran {call.task} answered nonsense: {error}")
    return error


class Child:
    """One child process and its two pipes, used by one thread at a time."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("child.py")), str(os.getpid()), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.into, self.out = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.ready = False
        self.last = ""  # what it wrote to its standard error at the end
        os.set_blocking(self.into, False)
        os.set_blocking(self.out, False)

    def wait_ready(self) -> None:
        """Wait for the hello of a new child."""
        if not self.ready:
            self._receive(1 << 20, monotonic() + START)
            self.ready = True

    def exchange(self, data: bytes, limit: int, wall: float) -> Reply:
        """Send a call, wait for its reply; Died, TimeoutError or TooLong."""
        deadline = monotonic() + wall
        view = memoryview(data)
        while view:
            self._wait(self.into, select.POLLOUT, deadline)
            try:
                view = view[os.write(self.into, view) :]
            except BrokenPipeError:
                raise Died from None
        return msgspec.msgpack.decode(self._receive(max(limit, 1 << 16), deadline), type=Reply)

    def kill(self) -> int:
        """End it now; its exit status (negative: the signal that ended it before)."""
        with suppress(subprocess.TimeoutExpired):
            if not self._alive():
                self.process.wait(1.0)  # its pipe is closed: let it say how it ended
        self.process.kill()
        status = self.process.wait()
        assert self.process.stdin and self.process.stdout and self.process.stderr
        os.set_blocking(self.process.stderr.fileno(), False)
        self.last = (self.process.stderr.read(1 << 16) or b"").decode(errors="replace").strip()[-500:]
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()
        return status

    def _alive(self) -> bool:
        """Whether the child still holds its end of the output pipe."""
        poll = select.poll()
        poll.register(self.out, 0)  # only hang-ups are told
        return not poll.poll(0)

    def _receive(self, limit: int, deadline: float) -> bytes:
        data, size = bytearray(), HEAD
        while len(data) < size:
            self._wait(self.out, select.POLLIN, deadline)
            if not (chunk := os.read(self.out, CHUNK)):
                raise Died
            data += chunk
            if size == HEAD and len(data) >= HEAD:
                size = HEAD + length(data[:HEAD], limit)
        return bytes(data[HEAD:size])

    def _wait(self, handle: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(handle, event)
        if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
            raise TimeoutError


def close_all(threads: ThreadPoolExecutor, idle: list[Child]) -> None:
    """End every child once the calls that run have ended."""
    threads.shutdown(wait=True, cancel_futures=True)
    while idle:
        idle.pop().kill()
