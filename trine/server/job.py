"""One request at work: n sequences in the engine, one stream of Deltas out.

A reader that is slow gets larger Deltas, not a longer queue, and one that reads nothing for
too many tokens is stopped. However a job ends, what is left of it in the engine is aborted in
the same turn of the loop. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import msgspec

from trine.core.messages import Ready
from trine.core.stats import StepStats
from trine.core.types import Output, Request, Usage

from . import limits
from .ask import Count, Delta
from .catalogue import Gone, Refusal, plain
from .choice import Choice, merge
from .timing import Meter, Timing

LAST_WORDS = 2.0  # seconds to wait for the usage of a sequence that was told to stop


class Health(Protocol):
    """Progress, not liveness."""

    @property
    def ok(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Outputs(Protocol):
    """The outputs of one request, in order; closing it aborts what is left."""

    def __aiter__(self) -> AsyncIterator[Output]: ...
    async def aclose(self) -> None: ...


class Engine(Protocol):
    """What the server asks of an engine, in this process or another (engine/client.py)."""

    @property
    def ready(self) -> Ready | None: ...
    @property
    def stats(self) -> StepStats: ...
    @property
    def health(self) -> Health: ...

    def submit(self, request: Request) -> Outputs: ...
    def abort(self, id: str) -> None: ...
    async def command(self, name: str, **values: Any) -> Any: ...


class Job:
    """Runs once: `async for delta in job.deltas()`."""

    def __init__(
        self, engine: Engine, requests: list[Request], choices: list[Choice], n: int, meter: Meter | None
    ) -> None:
        self.engine, self.requests, self.choices, self.n = engine, requests, choices, n
        self.timings = [Timing(meter, request.arrived) for request in requests]
        self.usages: list[Usage | None] = [None] * len(requests)
        self.running = {request.id for request in requests}
        self.unread: dict[int, Delta] = {choice.index: Delta(choice.index) for choice in choices}
        self.unread_tokens = 0
        self.wake = asyncio.Event()
        self.wake.set()
        self.error: BaseException | None = None

    async def deltas(self, seconds: float) -> AsyncGenerator[Delta, None]:
        """Every Delta of every choice, then one with the usage; raises a Refusal after `seconds`."""
        pumps = [
            asyncio.create_task(self._pump(request, choice))
            for request, choice in zip(self.requests, self.choices, strict=True)
        ]
        try:
            deadline = asyncio.get_running_loop().time() + seconds
            open_choices = len(self.choices)
            while open_choices:
                delta = await self._next(deadline, seconds)
                open_choices -= delta.finished is not None
                yield delta
            await asyncio.wait(pumps, timeout=LAST_WORDS)
            yield Delta(0, usage=self.usage())
        finally:
            self.abort()
            for pump in pumps:
                pump.cancel()
            for timing in self.timings:
                timing.finished("error" if self.error and not isinstance(self.error, Gone) else "abort")

    def abort(self) -> None:
        """Tell the engine to forget what still runs."""
        for id in self.running:
            self.engine.abort(id)
        self.running.clear()

    def stop(self, error: BaseException) -> bool:
        """End the job with an error once what was made before is read. False if it has ended."""
        if self.error or all(choice.finished for choice in self.choices):
            return False
        self.error = error
        self.abort()
        self.wake.set()
        return True

    def usage(self) -> Count:
        """Each prompt once, every choice's tokens. What the cache had is what the first of a
        prompt's choices found: the others find what the first one computed."""
        prompts = [request.prompt for request in self.requests[:: self.n]]
        firsts = [self.usages[i : i + self.n] for i in range(0, len(self.usages), self.n)]
        known = [[usage.cached for usage in group if usage] for group in firsts]
        cached = sum(min(group) for group in known) if all(known) else None
        return Count(sum(prompts), sum(choice.count for choice in self.choices), cached)

    async def _next(self, deadline: float, seconds: float) -> Delta:
        while not self.unread:
            if self.error:
                raise self.error
            self.wake.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self.wake.wait()
            except TimeoutError:
                raise Refusal("request_timeout", seconds=round(seconds)) from None
        delta = self.unread.pop(next(iter(self.unread)))
        self.unread_tokens = 0 if not self.unread else self.unread_tokens
        return delta

    async def _pump(self, request: Request, choice: Choice) -> None:
        """Move one sequence's Outputs to the reader."""
        try:
            async with contextlib.aclosing(self.engine.submit(request)) as outputs:
                async for output in outputs:
                    if output.finished:
                        self.running.discard(request.id)
                        self._ended(choice, output)
                    if choice.finished is None and self.error is None:
                        self._take(choice, output)
                    if output.finished:
                        return
                    if choice.finished and request.id in self.running:  # a stop string
                        self.engine.abort(request.id)
                        self.running.discard(request.id)
            if choice.finished is None:
                raise Refusal("engine_error", reason="it ended without a last word")
        except Exception as error:
            self.stop(error)

    def _ended(self, choice: Choice, output: Output) -> None:
        """The engine's last word. A stop string ended the choice before it."""
        usage = self.usages[choice.index] = output.usage
        if usage and choice.finished:
            usage = msgspec.structs.replace(usage, output=choice.count)
        self.timings[choice.index].finished(choice.finished or output.finished or "", usage)

    def _take(self, choice: Choice, output: Output) -> None:
        before = choice.count
        delta = choice.feed(output)
        self.timings[choice.index].tokens(choice.count - before)
        self.unread_tokens += len(output.tokens)
        if self.unread_tokens > limits.LAG_TOKENS:
            raise Refusal("slow_reader")
        if choice.index in self.unread:
            merge(self.unread[choice.index], delta)
        elif delta.text or delta.tokens or delta.finished:
            self.unread[choice.index] = delta
        self.wake.set()
        if output.finished == "abort":
            raise Refusal("aborted")
        if output.finished == "error":
            raise Refusal("engine_error", reason=plain(output.error, "it gave no reason"))
