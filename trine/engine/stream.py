"""One request's outputs, as its reader iterates over them.

It does not know where they come from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from trine.core.types import Output


class Stream:
    """Outputs of one request. A slow reader gets several in one; a reader who leaves, aborts.

    Leaving is: closing it, being cancelled while waiting, or dropping it."""

    def __init__(self, id: str, name: str, leave: Callable[[Stream], None]) -> None:
        self.id, self.name = id, name  # the client's, and the engine's
        self._leave = leave
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
        self._waiting.append(msgspec.structs.replace(output, id=self.id))
        self._news.set()

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
