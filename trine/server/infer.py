"""From a body to an answer, for every dialect of inference.

A dialect is a schema and pure functions; here is what they share: reading and admitting the
body, running the Ask, streaming or collecting, and stopping at once when the client goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from . import limits
from .admit import fields, parse
from .ask import Ask, Count, Delta, Facts
from .catalogue import Gone, Headers, Refusal
from .choice import merge
from .route import Caller, Face, Json, Route, caller
from .service import Service
from .sse import frame, stream


class Head(Struct, frozen=True):
    """What every event of one answer repeats."""

    id: str
    created: int
    model: str
    spell: Callable[[int], bytes]  # a token's bytes


class Dialect(Protocol):
    """One API's way to ask and to answer. All methods are pure."""

    @property
    def path(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def prefix(self) -> str: ...  # of the ids of its answers
    @property
    def schema(self) -> type[Struct]: ...
    @property
    def answer(self) -> type[Struct]: ...
    @property
    def unsupported(self) -> Mapping[str, tuple[Any, ...]]: ...
    @property
    def ignored(self) -> frozenset[str]: ...
    def ask(self, body: Any, facts: Facts) -> Ask: ...
    def opening(self, head: Head, ask: Ask) -> list[Struct]: ...
    def events(self, head: Head, ask: Ask, delta: Delta) -> list[Struct]: ...
    def whole(self, head: Head, ask: Ask, choices: list[Delta], usage: Count) -> Struct: ...


def route(dialect: Dialect) -> Route:
    """The route that speaks a dialect."""
    return Route(
        method="POST",
        path=dialect.path,
        access="inference",
        run=Speaker(dialect).run,
        about=dialect.about,
        body=dialect.schema,
        answer=dialect.answer,
    )


async def read(face: Face, request: Request) -> bytes:
    """The body, counted while it comes; all that come at once are counted together."""
    limit, parts, size = face.config.max_body_bytes, [], 0
    try:
        async with asyncio.timeout(limits.BODY_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                parts.append(part)
                size += len(part)
                face.held += len(part)
                if size > limit:
                    raise Refusal("body_too_large", limit=limit)
                if face.held > limit * limits.HELD_BODIES:
                    raise Refusal("rate_limit_exceeded", seconds=1)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Refusal("slow_request") from None
    finally:
        face.held -= size


class Speaker:
    """Runs one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    async def run(self, face: Face, request: Request) -> ASGIApp:
        facts, who = face.service.facts(), caller(request)
        ask = admit(self.dialect, await read(face, request), facts, who)
        spell = face.service.tokenizer.token_bytes
        head = Head(f"{self.dialect.prefix}-{who.id}", int(time.time()), facts.model, spell)
        return Answer(face.service, self.dialect, ask, head, who.id)


def admit(dialect: Dialect, raw: bytes, facts: Facts, who: Caller) -> Ask:
    """The one way in (rule S2): bytes to an Ask."""
    body, ignored = fields(
        parse(raw), dialect.schema, unsupported=dialect.unsupported, ignored=dialect.ignored
    )
    ask = dialect.ask(body, facts)
    return msgspec.structs.replace(ask, ignored=ignored, space=who.space)


class Answer:
    """An admitted Ask on its way to the client: one body, or a stream of events."""

    def __init__(self, service: Service, dialect: Dialect, ask: Ask, head: Head, id: str) -> None:
        self.service, self.dialect, self.ask, self.head, self.id = service, dialect, ask, head, id
        ignored = ",".join(ask.ignored).encode()
        self.headers: Headers = [(b"x-ignored-fields", ignored)] if ignored else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(
            self._stream(scope, send) if self.ask.stream else self._whole(scope, receive, send)
        )
        watch = asyncio.ensure_future(self._watch(receive, work))
        try:
            await asyncio.wait({work})
        finally:
            watch.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        if work.cancelled():
            raise Gone
        work.result()

    async def _watch(self, receive: Receive, work: asyncio.Future[None]) -> None:
        """Abort in the turn in which the client is known to have gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not work.done():
            self.service.stop(self.id, Gone())
            work.cancel()

    async def _stream(self, scope: Scope, send: Send) -> None:
        async with contextlib.aclosing(self._events()) as events:
            await stream(scope, send, events, self.headers)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        opened = False
        async with contextlib.aclosing(self.service.generate(self.ask, self.id)) as deltas:
            async for delta in deltas:
                if not opened:
                    opened = True
                    for event in self.dialect.opening(self.head, self.ask):
                        yield frame(event)
                for event in self.dialect.events(self.head, self.ask, delta):
                    yield frame(event)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        found: dict[int, Delta] = {}
        usage = Count(0, 0, None)
        async with contextlib.aclosing(self.service.generate(self.ask, self.id)) as deltas:
            async for delta in deltas:
                if delta.usage:
                    usage = delta.usage
                elif delta.index in found:
                    merge(found[delta.index], delta)
                else:
                    found[delta.index] = delta
        choices = [found[index] for index in sorted(found)]
        answer = self.dialect.whole(self.head, self.ask, choices, usage)
        await Json(answer, headers=self.headers)(scope, receive, send)
