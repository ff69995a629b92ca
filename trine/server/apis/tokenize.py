"""Text to token ids and back, as the model sees them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from trine.server import limits
from trine.server.admit import fields, parse, token_ids
from trine.server.ask import Ask
from trine.server.catalogue import Refusal
from trine.server.controls import Name
from trine.server.infer import read
from trine.server.route import Face, Json, Route
from trine.server.turns import Messages, turns


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt, or messages for the chat template."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None


class Tokens(Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name | None = None
    tokens: Annotated[list[int], Meta(max_length=limits.JSON_ITEMS)]


class Text(Struct, frozen=True):
    prompt: str


async def tokenize(face: Face, request: Request) -> ASGIApp:
    """What does not fit the context is refused here as well."""
    facts = face.service.facts()
    body, _ = fields(parse(await read(face, request)), TokenizeBody)
    if body.model not in (None, facts.model):
        raise Refusal("model_not_found", "model")
    if (body.prompt is None) == (body.messages is None):
        field = "prompt" if body.prompt is None else "messages"
        raise Refusal("invalid_value", field, wanted="the one of prompt and messages that is given")
    if body.messages is None:
        ask = Ask(prompts=[body.prompt or ""])
    else:
        ask = Ask(messages=turns(body.messages), field="messages")
    (ids,) = await face.service.encode(ask, facts)
    return Json(Tokens(ids, len(ids), facts.max_model_len))


async def detokenize(face: Face, request: Request) -> ASGIApp:
    """Special tokens are shown as their names."""
    facts = face.service.facts()
    body, _ = fields(parse(await read(face, request)), DetokenizeBody)
    if body.model not in (None, facts.model):
        raise Refusal("model_not_found", "model")
    ids = token_ids(body.tokens, facts.vocab, "tokens")
    return Json(Text(await face.service.aside(face.service.tokenizer.decode, ids, False)))


PLUGIN = (
    Route(
        method="POST",
        path="/tokenize",
        access="inference",
        run=tokenize,
        about="The token ids of a prompt or of messages.",
        body=TokenizeBody,
        answer=Tokens,
    ),
    Route(
        method="POST",
        path="/detokenize",
        access="inference",
        run=detokenize,
        about="The text of token ids.",
        body=DetokenizeBody,
        answer=Text,
    ),
)
