"""The door (rule S5): one ASGI layer on the raw request, deny by default.

It reads the raw path, never a rebuilt one, and lets through what the route table names. Who
may ask: a Host of the allow-list (no other name reaches a page's requests to this machine),
an Origin that was allowed, a key for everything but liveness. It answers in OpenAI's shape,
and turns what routes raise into answers of the catalogue. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import re
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import limits
from .catalogue import Gone, Headers, Refusal, encode, headers, refusal
from .route import Caller, Table
from .service import new_id
from .timing import Meter

HOST = re.compile(rb"(\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(:[0-9]{1,5})?")
JSON = re.compile(rb"application/json(?:\s*;\s*charset=\"?utf-8\"?)?", re.IGNORECASE)
LABEL = re.compile(limits.LABEL.encode())
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY = ("0.0.0.0", "::", "")  # listening addresses that name no host


class Rules(Struct, frozen=True):
    """What one listener asks of a request."""

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # beside loopback
    origins: tuple[str, ...] = ()
    max_body: int = 8 * 1024 * 1024


class Access:
    """Wraps the application of a route table."""

    def __init__(self, app: ASGIApp, table: Table, rules: Rules, meter: Meter | None = None) -> None:
        self.app, self.table, self.rules, self.meter = app, table, rules, meter
        self.hosts = {name.lower().encode() for name in (*LOOPBACK, *rules.hosts) if name not in ANY}
        self.origins = {origin.encode() for origin in rules.origins}
        self.keys = [(_digest(key.encode()), _space(key)) for key in rules.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, nothing to do at start and end
            return
        exchange = Exchange(scope, receive, send, self.origins)
        try:
            self.check(scope, exchange)
            if scope["method"] == "OPTIONS":
                await exchange.preflight()
            else:
                await self.app(scope, exchange.receive, exchange.send)
        except Gone:
            return
        except Exception as error:
            if exchange.started:  # the answer is cut: closing the connection is all that is left
                raise
            answer = refusal(error)
            if self.meter:
                self.meter.rejected(answer.code)
            await exchange.refuse(answer)

    def check(self, scope: Scope, exchange: Exchange) -> None:
        """Everything that can be said before the body: raises a Refusal, or notes the caller."""
        fields: Headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in fields)
        if len(fields) > limits.HEADERS or size > limits.HEADER_BYTES:
            raise Refusal("headers_too_large", bytes=limits.HEADER_BYTES, count=limits.HEADERS)
        self._host(scope, fields)
        self._origin(scope, fields)
        if scope["method"] == "OPTIONS" and exchange.origin is not None:
            return  # a browser asks on behalf of an allowed page
        route = self.table.find(scope["method"], scope.get("raw_path") or scope["path"].encode())
        label = values(fields, b"x-request-id")
        if label and not (len(label) == 1 and LABEL.fullmatch(label[0])):
            raise Refusal("invalid_request_id", "X-Request-Id")
        space = "" if route.access != "inference" else self._space(fields)
        if route.method == "POST":
            self._body(fields)
        caller = Caller(new_id(), space)
        exchange.label = label[0] if label else caller.id.encode()
        scope.setdefault("state", {})["caller"] = caller

    def _host(self, scope: Scope, fields: Headers) -> None:
        hosts = values(fields, b"host")
        match = HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if match is None or not (match.group(1) in self.hosts or match.group(1) == _address(scope)):
            raise Refusal("wrong_host")

    def _origin(self, scope: Scope, fields: Headers) -> None:
        """A page of our own (the Host was checked) or of an origin that was allowed."""
        origins = values(fields, b"origin")
        own = scope["scheme"].encode() + b"://" + values(fields, b"host")[0].lower()
        if len(origins) > 1 or any(o not in self.origins and o.lower() != own for o in origins):
            raise Refusal("wrong_origin")

    def _space(self, fields: Headers) -> str:
        """The cache space of the key that was given; every key is compared, always."""
        if not self.keys:
            return ""
        given = values(fields, b"authorization")
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if not given or not key.strip():
            raise Refusal("missing_api_key")
        digest, found = _digest(key.strip()), None
        for known, space in self.keys:
            if hmac.compare_digest(digest, known):
                found = space
        if found is None or scheme.lower() != b"bearer":
            raise Refusal("invalid_api_key")
        return found

    def _body(self, fields: Headers) -> None:
        kinds = values(fields, b"content-type")
        if not values(fields, b"transfer-encoding") and values(fields, b"content-length") in ([], [b"0"]):
            return  # no body at all: routes that want one say so
        if any(encoding.lower() != b"identity" for encoding in values(fields, b"content-encoding")):
            raise Refusal("wrong_content_encoding")
        if len(kinds) != 1 or not JSON.fullmatch(kinds[0].strip()):
            raise Refusal("wrong_content_type")
        for size in values(fields, b"content-length"):
            if not size.isdigit():
                raise Refusal("bad_request")
            if len(size) > 15 or int(size) > self.rules.max_body:
                raise Refusal("body_too_large", limit=self.rules.max_body)


class Exchange:
    """One request and its answer: what was read, what was sent, and the headers every answer has."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, origins: set[bytes]) -> None:
        self._receive, self._send = receive, send
        fields: Headers = scope["headers"]
        sizes = values(fields, b"content-length")
        self.whole = not values(fields, b"transfer-encoding") and all(size == b"0" for size in sizes)
        self.origin = next((o for o in values(fields, b"origin") if o in origins), None)
        self.label: bytes | None = None
        self.started = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.whole = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message = {**message, "headers": [*message.get("headers", []), *self._common()]}
        try:
            await self._send(message)
        except OSError:
            raise Gone from None

    async def refuse(self, error: Refusal) -> None:
        raw = encode(error)
        fields = [*headers(error), (b"content-length", str(len(raw)).encode())]
        if not self.whole:  # the rest of the body is not worth reading
            fields.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": error.status, "headers": fields})
        await self.send({"type": "http.response.body", "body": raw})

    async def preflight(self) -> None:
        """Tell a browser that its page, whose origin was allowed, may ask."""
        fields: Headers = [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
            (b"content-length", b"0"),
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": fields})
        await self.send({"type": "http.response.body", "body": b""})

    def _common(self) -> Headers:
        found: Headers = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
        if self.label is not None:
            found.append((b"x-request-id", self.label))
        if self.origin is not None:
            found += [(b"access-control-allow-origin", self.origin), (b"vary", b"origin")]
        return found


def values(fields: Headers, name: bytes) -> list[bytes]:
    """Every value of a header."""
    return [value for key, value in fields if key == name]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _space(key: str) -> str:
    return hashlib.sha256(b"trine cache space\0" + key.encode()).hexdigest()[:32]


def _address(scope: Scope) -> bytes | None:
    """The address this connection was made to, as a Host writes it: no name of a page can be it."""
    server: Any = scope.get("server")
    with contextlib.suppress(ValueError, TypeError):
        address = ipaddress.ip_address(server[0])
        return f"[{address}]".encode() if address.version == 6 else str(address).encode()
    return None
