"""The ASGI applications: the routes that the dialects declare, behind the door.

Public and admin are two applications over one service: what changes state is not in the
public one at all (rule S5).
"""

from __future__ import annotations

from starlette.routing import Route as Path
from starlette.routing import Router
from starlette.types import ASGIApp

from trine.config import Config, environment_keys
from trine.registry import find

from .access import Access, Rules
from .route import Endpoint, Face, Route, Table, check
from .service import Service

PUBLIC = ("inference", "liveness")
ADMIN = ("admin", "liveness")


def every_route() -> tuple[Route, ...]:
    """The routes of every dialect: files of `server/apis`, and entry points."""
    found = tuple(route for _, routes in sorted(find("server.apis").items()) for route in routes)
    for route in found:
        check(route)
    return found


def make_app(
    service: Service,
    config: Config,
    *,
    admin: bool = False,
    routes: tuple[Route, ...] | None = None,
) -> ASGIApp:
    """The application of one listener. ConfigError if a route has no access class."""
    wanted = ADMIN if admin else PUBLIC
    table = routes if routes is not None else every_route()
    for route in table:
        check(route)
    served = tuple(route for route in table if route.access in wanted)
    face = Face(service, config, served)
    paths = [
        Path(route.path.replace("{id}", "{id:path}"), Endpoint(face, route), methods=[route.method])
        for route in served
    ]
    return Access(Router(routes=paths), Table(served), rules(config, admin), service.meter)


def rules(config: Config, admin: bool) -> Rules:
    """Who may ask. The admin socket's mode is its key."""
    if admin:
        return Rules(max_body=config.max_body_bytes)
    return Rules(
        keys=(*config.api_key, *environment_keys()),
        hosts=(config.host, *config.allowed_hosts),
        origins=config.allowed_origins,
        max_body=config.max_body_bytes,
    )
