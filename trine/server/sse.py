"""Server-sent events: a stream that ends with exactly one terminal event (rule S10).

The last word is decided before the first one is sent: an error, unless the events came to
their end; it is written in a `finally`. A comment goes out while nothing else does. A reader
that takes nothing for too long is cut off. Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.types import Scope, Send

from . import limits
from .catalogue import Gone, Headers, Refusal, encode, refusal

DONE = b"data: [DONE]\n\n"
HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
PAUSE = b": still working\n\n"


def frame(value: Any) -> bytes:
    """One event of one struct."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_frame(error: BaseException) -> bytes:
    return b"event: error\ndata: " + encode(refusal(error)) + b"\n\n"


async def stream(scope: Scope, send: Send, events: AsyncGenerator[bytes, None], headers: Headers) -> None:
    """Send events as they come. What goes wrong before the first one is raised, not sent."""
    first = await anext(events)
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [*HEADERS, *headers],
        }
    )
    last: bytes | None = error_frame(Refusal("internal_error"))
    try:
        await _put(scope, send, first)
        async with contextlib.aclosing(_paced(events)) as paced:
            async for event in paced:
                await _put(scope, send, event)
        last = DONE
    except asyncio.CancelledError:
        last = error_frame(Refusal("shutting_down"))
        raise
    except Gone:
        last = None
        raise
    except Exception as error:
        last = error_frame(error)
    finally:
        if last is not None:
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _put(scope: Scope, send: Send, event: bytes) -> None:
    try:
        async with asyncio.timeout(limits.STALL_SECONDS):
            await send({"type": "http.response.body", "body": event, "more_body": True})
    except TimeoutError:
        if sever := scope["state"].get("sever"):  # a last word would wait as well
            sever()
        raise Refusal("slow_reader") from None


async def _paced(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events, and a comment in each long silence."""
    while True:
        ahead = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        try:
            while not (await asyncio.wait({ahead}, timeout=limits.KEEP_ALIVE_SECONDS))[0]:
                yield PAUSE
            yield ahead.result()
        except StopAsyncIteration:
            return
        finally:
            if not ahead.done():
                ahead.cancel()
                await asyncio.wait({ahead})
            if not ahead.cancelled():
                ahead.exception()  # seen: when the reader has gone, nobody else asks for it
