"""HTTP/1.1 from the socket, with bounds: uvicorn's httptools protocol, made hard to hurt.

Added to it: the head of a request may have so many bytes, fields and seconds; so may the whole
message, chunk framing and trailers included; only origin-form targets; no pipelining (a client
that does must expect the connection to close); what is not HTTP gets the catalogue's answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from . import limits
from .catalogue import Refusal, encode, headers

log = logging.getLogger(__name__)
SLICE = 16 * 1024  # bytes given to the parser at a time
FRAMING = 8  # a body may come in chunks whose framing adds an eighth, and this much always:
LEAST_FRAMING = 64 * 1024
FRAMING_FIELDS = (b"content-length", b"transfer-encoding")
TARGET = re.compile(rb'/[!-"$-~]*')  # no fragment, no blank, ASCII only


class Wire(HttpToolsProtocol):
    """One connection. `max_body` bounds a message as a whole; the body itself is counted later."""

    def __init__(self, *arguments: Any, max_body: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.most = max_body + max_body // FRAMING + LEAST_FRAMING
        self.raw = self.body = 0  # bytes of the message being read; of those, of its body
        self.head = True  # its headers are not complete, or none has begun
        self.deaf = False  # what still comes is dropped
        self.primed = True  # the parser reads what the client sent
        self.late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if self.head and self.raw == 0 and self.late is None:
            self._expect_head()
        self._unset_keepalive_if_required()
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            self.raw += len(piece)
            self._feed(piece)
            if self.deaf or self.parser is None:
                return
            self._measure()

    def _measure(self) -> None:
        """Headers that do not end, a message that is too large, and chunks that hold next to nothing."""
        if self.head and self.raw > limits.HEADER_BYTES:
            self.refuse(Refusal("headers_too_large", bytes=limits.HEADER_BYTES, count=limits.HEADERS))
        elif self.raw > self.most or self.raw - self.body > LEAST_FRAMING + self.body // FRAMING:
            self.refuse(Refusal("body_too_large", limit=self.most))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.refuse(Refusal("bad_request"))

    def _stay(self, rest: bytes) -> None:
        """A client that would like another protocol gets this one. The parser has stopped after the
        headers; a new one is told how the body comes, and reads it."""
        self.parser = httptools.HttpRequestParser(self)
        framing = [b": ".join(field) for field in self.headers if field[0] in FRAMING_FIELDS]
        self.primed = False
        self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
        self.primed = True
        self._feed(rest)

    def on_message_begin(self) -> None:
        if not self.primed:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.deaf = True  # pipelined: the first is answered, and we go on listening for its end
            self.cycle.keep_alive = False
            return
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.primed and not self.deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.primed and self.head and not self.deaf and len(self.headers) <= limits.HEADERS:  # no trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.deaf or not self.primed:
            return
        self._head_came()
        self.head = False
        if not TARGET.fullmatch(self.url):  # absolute-form names another host than Host does
            raise ValueError("the target is not in origin-form")
        super().on_headers_complete()
        self.scope.setdefault("state", {})["sever"] = self.transport.abort

    def on_body(self, body: bytes) -> None:
        if self.deaf:
            return
        self.body += len(body)
        super().on_body(body)
        if len(self.cycle.body) > limits.EARLY_BODY:  # the application resumes when it reads
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self.deaf or self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.raw, self.body, self.head = 0, 0, True

    def send_400_response(self, msg: str) -> None:
        self.refuse(Refusal("bad_request"))

    def refuse(self, error: Refusal) -> None:
        """Answer, unless an answer is on its way, and close."""
        self.deaf = True
        self._head_came()
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_answer(error))
        elif not self.cycle.response_started:
            self.cycle.disconnected = True  # the application is told that the client has gone
            self.cycle.message_event.set()
            self.transport.write(_answer(error))
        self.transport.close()

    def _expect_head(self) -> None:
        self.late = self.loop.call_later(limits.HEADER_SECONDS, self._too_late)

    def _head_came(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None

    def _too_late(self) -> None:
        self.late = None
        if self.raw:
            self.refuse(Refusal("slow_request"))
        else:
            self.transport.close()


def _answer(error: Refusal) -> bytes:
    raw = encode(error)
    lines = [b"HTTP/1.1 %d Refused" % error.status]
    fields = [*headers(error), (b"content-length", b"%d" % len(raw)), (b"connection", b"close")]
    lines += [name + b": " + value for name, value in fields]
    return b"\r\n".join([*lines, b"", raw])
