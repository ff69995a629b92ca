"""What changes state, for the operator alone: it answers on the admin socket, never in public (S5)."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from trine.server.admit import fields, parse
from trine.server.catalogue import Refusal
from trine.server.infer import read
from trine.server.route import Face, Json, Route
from trine.version import __version__

ID = re.compile(r"(?:[a-z]+-)?([0-9a-f]{32})")


class AbortBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The `id` of an answer, or everything."""

    id: str | None = None
    all: bool = False


class Aborted(Struct, frozen=True):
    aborted: int


class Flushed(Struct, frozen=True):
    flushed: bool


class Info(Struct, frozen=True):
    version: str
    model: str
    plan: list[tuple[str, str, str]]  # name, value, why
    config: dict[str, Any]
    stats: dict[str, Any]
    live: list[str]  # ids of requests at work


async def flush(face: Face, request: Request) -> ASGIApp:
    """Forget the cached prefixes that no request holds."""
    face.service.facts()
    await face.service.engine.command("flush")
    return Json(Flushed(True))


async def abort(face: Face, request: Request) -> ASGIApp:
    """End requests with an error."""
    body, _ = fields(parse(await read(face, request)), AbortBody)
    if body.all:
        return Json(Aborted(face.service.stop_all(Refusal("aborted"))))
    match = ID.fullmatch(body.id or "")
    if match is None:
        raise Refusal("invalid_value", "id", wanted="the id of an answer, or all must be true")
    return Json(Aborted(int(face.service.stop(match.group(1), Refusal("aborted")))))


async def info(face: Face, request: Request) -> ASGIApp:
    """What was decided and why, what was asked for (keys apart), and how it goes."""
    ready = face.service.engine.ready
    config = {k: v for k, v in msgspec.to_builtins(face.config).items() if k != "api_key"}
    stats = msgspec.to_builtins(face.service.engine.stats)
    plan = ready.plan if ready else []
    return Json(Info(__version__, face.service.model, plan, config, stats, list(face.service.jobs)))


PLUGIN = (
    Route(
        method="POST",
        path="/flush_cache",
        access="admin",
        run=flush,
        about=flush.__doc__ or "",
        answer=Flushed,
    ),
    Route(
        method="POST",
        path="/abort",
        access="admin",
        run=abort,
        about=abort.__doc__ or "",
        body=AbortBody,
        answer=Aborted,
    ),
    Route(method="GET", path="/server_info", access="admin", run=info, about=info.__doc__ or "", answer=Info),
)
