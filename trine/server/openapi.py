"""The OpenAPI document, made of the route table and its structs: it cannot be out of date."""

from __future__ import annotations

from typing import Any

import msgspec

from trine.version import __version__

from .catalogue import Error
from .route import Route

TEMPLATE = "#/components/schemas/{name}"


def document(routes: tuple[Route, ...]) -> bytes:
    """OpenAPI 3.1 of the given routes."""
    kinds = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, Error], ref_template=TEMPLATE)
    known = dict(zip([*kinds, Error], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Trine", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(route: Route, known: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answer = {"content": _json(known[route.answer])} if route.answer else {}
    found: dict[str, Any] = {
        "summary": route.about,
        "responses": {
            "200": {"description": "done", **answer},
            "default": {"description": "refused", "content": _json(known[Error])},
        },
    }
    if route.path.endswith("{id}"):
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.body:
        found["requestBody"] = {"required": True, "content": _json(known[route.body])}
    if route.access == "inference":
        found["security"] = [{"key": []}]
    return found


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
