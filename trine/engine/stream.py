"""One request's outputs, as its reader iterates over them; and when they came.

It does not know where they come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from trine.core.types import Output, Request, Usage


class Watcher(Protocol):
    """Who wants to hear of one sequence's times, in seconds: `metrics.Metrics` does."""

    def first_token(self, seconds: float) -> None: ...
    def token(self, seconds: float, count: int = 1) -> None: ...
    def tokens(self, count: int) -> None: ...
    def finished(
        self, reason: str, seconds: float, usage: Usage | None = None, first: float = 0.0
    ) -> None: ...


class Stream:
    """Outputs of one request. A slow reader gets several in one; a reader who leaves, aborts.

    Leaving is: closing it, being cancelled while waiting, or dropping it."""

    def __init__(
        self, request: Request, name: str, leave: Callable[[Stream], None], watcher: Watcher | None = None
    ) -> None:
        self.id, self.name = request.id, name  # the client's, and the engine's
        self._leave, self._watcher = leave, watcher
        self._began = request.arrived or time.monotonic()
        self._first = self._last = 0.0
        self._waiting: list[Output] = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._open = True

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Output:
        if not self._open:
            raise StopAsyncIteration
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        self._news.clear()
        if not self._waiting and self._error:
            self._open = False
            raise self._error
        output, self._waiting = merged(self._waiting), []
        if output.finished:
            self._open = False
        elif self._error:
            self._news.set()
        return output

    def feed(self, output: Output) -> None:
        self.measure(output)
        self._waiting.append(msgspec.structs.replace(output, id=self.id))
        self._news.set()

    def measure(self, output: Output) -> None:
        if not (watcher := self._watcher):
            return
        now = time.monotonic()
        if output.tokens:
            watcher.tokens(len(output.tokens))
            if self._first:
                watcher.token(now - self._last, len(output.tokens))
            else:
                self._first = now - self._began
                watcher.first_token(self._first)
            self._last = now
        if output.finished:
            watcher.finished(output.finished, now - self._began, output.usage, self._first)

    def fail(self, error: Exception) -> None:
        """No more will come, and why."""
        self._error = error
        self._news.set()

    def close(self) -> None:
        """Abort, if it has not ended."""
        if self._open:
            self._open = False
            self._leave(self)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the loop may be gone at exit
            self.close()


def merged(outputs: list[Output]) -> Output:
    """Several Outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return msgspec.structs.replace(
        last,
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=[each for output in outputs for each in output.logprobs or []]
        if any(output.logprobs is not None for output in outputs)
        else None,
    )
