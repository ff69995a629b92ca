"""OpenAI's chat completions: the schema, body -> Ask, Deltas -> events or body."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from trine.server import limits
from trine.server.ask import Ask, Count, Delta, Facts, Token
from trine.server.catalogue import Refusal
from trine.server.controls import (
    IGNORED,
    UNSUPPORTED,
    Controls,
    MaxTokens,
    check,
    given,
    sampling,
    stops,
)
from trine.server.infer import Head, route
from trine.server.openai import Usage, counted, finite, no_usage, spelled
from trine.server.turns import Argument, Messages, arguments, turns


class ChatBody(Controls, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat completion."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Argument], Meta(max_length=limits.TEMPLATE_VALUES)] | None = (
        None
    )


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class Said(Struct, frozen=True, kw_only=True):
    """The message of an answer."""

    role: str = "assistant"
    content: str
    refusal: None = None


class Piece(Struct, frozen=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class Choice(Struct, frozen=True):
    index: int
    message: Said
    finish_reason: str | None
    logprobs: Logprobs | None = None


class PieceChoice(Struct, frozen=True):
    index: int
    delta: Piece
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """A chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Chunk(Struct, frozen=True):
    """An event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[PieceChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class Chat:
    """The dialect."""

    path = "/v1/chat/completions"
    about = "The next message of a chat; with stream, as server-sent events."
    prefix = "chatcmpl"
    schema, answer = ChatBody, Completion
    ignored = IGNORED
    unsupported = {
        **UNSUPPORTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
        "store": (False,),
        "chat_template": (),
        "documents": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }

    def ask(self, body: ChatBody, facts: Facts) -> Ask:
        """An Ask for the next message."""
        limit = _limit(body)
        check(body, facts, limit)
        if body.top_logprobs and not body.logprobs:
            raise Refusal("invalid_value", "top_logprobs", wanted="left out when logprobs is not true")
        logprobs = given(body.top_logprobs, 0) if body.logprobs else None
        return Ask(
            messages=turns(body.messages),
            arguments=arguments(given(body.chat_template_kwargs, {})),
            field="messages",
            limit_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            n=given(body.n, 1),
            max_tokens=limit,
            stops=stops(body),
            sampling=sampling(body, facts, logprobs),
            priority=given(body.priority, 0),
            stream=given(body.stream, False),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )

    def opening(self, head: Head, ask: Ask) -> list[Struct]:
        """Who speaks, once for each choice."""
        first = Piece(role="assistant", content="")
        return [_chunk(head, [PieceChoice(i, first)], no_usage(ask)) for i in range(ask.n)]

    def events(self, head: Head, ask: Ask, delta: Delta) -> list[Struct]:
        """Text, then the reason of the end, then the usage: each in an event of its own."""
        if delta.usage:
            return [_chunk(head, [], counted(delta.usage))] if ask.include_usage else []
        pieces: list[PieceChoice] = []
        if delta.text or delta.tokens:
            shown = logprobs(head, ask, delta.tokens)
            pieces.append(PieceChoice(delta.index, Piece(content=delta.text), shown))
        if delta.finished:
            pieces.append(PieceChoice(delta.index, Piece(), finish_reason=delta.finished))
        return [_chunk(head, [piece], no_usage(ask)) for piece in pieces]

    def whole(self, head: Head, ask: Ask, choices: list[Delta], usage: Count) -> Struct:
        """The completion in one body."""
        found = [
            Choice(one.index, Said(content=one.text), one.finished, logprobs(head, ask, one.tokens))
            for one in choices
        ]
        return Completion(
            id=head.id, created=head.created, model=head.model, choices=found, usage=counted(usage)
        )


def _limit(body: ChatBody) -> int | None:
    """max_completion_tokens is the new name of max_tokens: both may be given if they agree."""
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise Refusal("invalid_value", "max_completion_tokens", wanted="equal to max_tokens, or the only one")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def logprobs(head: Head, ask: Ask, tokens: list[Token]) -> Logprobs | None:
    """The logprobs of a choice or of a piece of it, if they were asked for."""
    if ask.sampling.logprobs is None:
        return None
    return Logprobs([_logprob(head, token) for token in tokens])


def _logprob(head: Head, token: Token) -> TokenLogprob:
    raw = head.spell(token.id)
    top = [
        TopLogprob(spelled(spelling), finite(logprob), list(spelling))
        for spelling, logprob in ((head.spell(id), logprob) for id, logprob in token.logprob.top)
    ]
    return TokenLogprob(spelled(raw), finite(token.logprob.logprob), list(raw), top)


def _chunk(head: Head, choices: list[PieceChoice], usage: Usage | UnsetType | None) -> Chunk:
    return Chunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)


PLUGIN = (route(Chat()),)
