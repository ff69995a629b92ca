"""A route: where, how, for whom. The table of them is what the door lets through, what the
OpenAPI page shows and what the tests walk over; a route without a class does not start (S5).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from trine.config import Config
from trine.errors import ConfigError

from .catalogue import Headers, Refusal
from .service import Service

ACCESS = ("inference", "liveness", "admin")  # with a key; without; on the admin socket only
METHODS = ("GET", "POST")


@dataclass(slots=True)
class Face:
    """What routes may use."""

    service: Service
    config: Config
    routes: tuple[Route, ...] = ()
    held: int = 0  # bytes of bodies that are being read
    created: int = field(default_factory=lambda: int(time.time()))


class Route(Struct, frozen=True, kw_only=True):
    """One method of one path. `{id}` at a path's end takes the rest of it."""

    method: str
    path: str
    access: str
    run: Callable[[Face, Request], Awaitable[ASGIApp]]
    about: str = ""
    body: Any = None  # the struct of its JSON body
    answer: Any = None  # the struct of its JSON answer


class Caller(Struct, frozen=True):
    """Who asks, as the door saw it; in the scope's state."""

    id: str  # of the request, ours
    space: str = ""  # of the key that was given


def caller(request: Request) -> Caller:
    return request.scope["state"]["caller"]


class Endpoint:
    """A Route as an ASGI application."""

    def __init__(self, face: Face, route: Route) -> None:
        self.face, self.route = face, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self.route.run(self.face, Request(scope, receive))
        await answer(scope, receive, send)


class Table:
    """Routes by raw path. Only an exact match counts."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self.exact: dict[bytes, dict[str, Route]] = {}
        self.tails: dict[bytes, dict[str, Route]] = {}
        for route in routes:
            check(route)
            stem, _, tail = route.path.partition("{")
            known = (self.tails if tail else self.exact).setdefault(stem.encode(), {})
            if route.method in known:
                raise ConfigError(f"two routes for {route.method} {route.path}")
            known[route.method] = route

    def find(self, method: str, path: bytes) -> Route:
        """The route of a raw path; a Refusal if there is none."""
        found = self.exact.get(path)
        if found is None:
            found = next(
                (r for stem, r in self.tails.items() if path.startswith(stem) and path != stem), None
            )
        if found is None:
            raise Refusal("unknown_url")
        if route := found.get("GET" if method == "HEAD" else method):
            return route
        raise Refusal("wrong_method", allowed=" or ".join(sorted(found)))


def check(route: Route) -> None:
    """Refuse to start with a route nobody classed."""
    if route.access not in ACCESS:
        raise ConfigError(
            f"route {route.method} {route.path} has the access class {route.access!r}, not one of {ACCESS}"
        )
    if route.method not in METHODS or not route.path.startswith("/"):
        raise ConfigError(f"route {route.method} {route.path}: the method must be one of {METHODS}")


class Raw:
    """An answer of bytes."""

    def __init__(self, raw: bytes, kind: bytes, status: int = 200, headers: Headers | None = None) -> None:
        self.raw, self.kind, self.status, self.headers = raw, kind, status, headers or []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = str(len(self.raw)).encode()
        headers = [(b"content-type", self.kind), (b"content-length", size), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.raw})


class Json(Raw):
    """An answer of one struct."""

    def __init__(self, value: Any, status: int = 200, headers: Headers | None = None) -> None:
        super().__init__(msgspec.json.encode(value), b"application/json", status, headers)
