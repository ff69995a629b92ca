"""OpenAI's list of models: there is one."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from trine.server.catalogue import Refusal
from trine.server.route import Face, Json, Route

PATH = "/v1/models"


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "trine"
    max_model_len: int


class Models(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


def model(face: Face) -> Model:
    facts = face.service.facts()
    return Model(id=facts.model, created=face.created, max_model_len=facts.max_model_len)


async def every(face: Face, request: Request) -> ASGIApp:
    return Json(Models(data=[model(face)]))


async def one(face: Face, request: Request) -> ASGIApp:
    """The name is compared, nothing else: it is never a path."""
    tail = request.scope["raw_path"].removeprefix(PATH.encode() + b"/")
    if unquote_to_bytes(tail) != face.service.model.encode():
        raise Refusal("model_not_found", "model")
    return Json(model(face))


PLUGIN = (
    Route(method="GET", path=PATH, access="inference", run=every, about="What is served.", answer=Models),
    Route(method="GET", path=PATH + "/{id}", access="inference", run=one, about="One model.", answer=Model),
)
