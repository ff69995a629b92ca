"""How the server is: health (progress, not liveness), readiness, version, load, metrics, schemas."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from trine.server.catalogue import Refusal, plain
from trine.server.openapi import document
from trine.server.route import Face, Json, Raw, Route
from trine.version import __version__


class State(Struct, frozen=True):
    """`status`: "ok", or "failing" with the reason."""

    status: str
    reason: str


class Version(Struct, frozen=True):
    version: str


class Load(Struct, frozen=True):
    live: int  # sequences asked for and not ended
    running: int
    waiting: int


async def health(face: Face, request: Request) -> ASGIApp:
    """200 while the engine beats and makes progress, else 503 with the reason."""
    found = face.service.engine.health
    reason = plain(found.reason, "the engine does not answer")
    return Json(State("ok" if found.ok else "failing", reason), 200 if found.ok else 503)


async def ready(face: Face, request: Request) -> ASGIApp:
    """200 while requests are taken: a load balancer's question."""
    face.service.facts()
    found = face.service.engine.health
    if not found.ok:
        raise Refusal("not_ready", seconds=1, reason=plain(found.reason, "it does not answer"))
    return Json(State("ok", "requests are taken"))


async def version(face: Face, request: Request) -> ASGIApp:
    return Json(Version(__version__))


async def load(face: Face, request: Request) -> ASGIApp:
    stats = face.service.engine.stats
    return Json(Load(face.service.live, stats.running, stats.waiting))


async def metrics(face: Face, request: Request) -> ASGIApp:
    meter = face.service.meter
    return Raw(meter.text() if meter else b"", b"text/plain; version=0.0.4; charset=utf-8")


async def openapi(face: Face, request: Request) -> ASGIApp:
    return Raw(document(face.routes), b"application/json")


PLUGIN = (
    Route(
        method="GET", path="/health", access="liveness", run=health, about=health.__doc__ or "", answer=State
    ),
    Route(
        method="GET", path="/ping", access="liveness", run=health, about="The same as /health.", answer=State
    ),
    Route(method="GET", path="/ready", access="liveness", run=ready, about=ready.__doc__ or "", answer=State),
    Route(
        method="GET", path="/version", access="liveness", run=version, about="The version.", answer=Version
    ),
    Route(method="GET", path="/load", access="inference", run=load, about="Work at hand.", answer=Load),
    Route(method="GET", path="/metrics", access="inference", run=metrics, about="Prometheus series."),
    Route(method="GET", path="/openapi.json", access="inference", run=openapi, about="This document."),
)
