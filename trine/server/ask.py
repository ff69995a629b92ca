"""What a dialect asks of the service and what it hears back: the words of the server.

A dialect makes an `Ask` of a body, and events or a body of `Delta`s. Neither knows of HTTP.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from trine.core.types import Logprob, Sampling


class Facts(Struct, frozen=True):
    """What admission must know of the model that is served."""

    model: str  # the name clients use
    vocab: int  # token ids are in [0, vocab)
    max_model_len: int  # prompt plus output, tokens
    most: int  # sequences that may be running and queued together
    ranked: bool = False  # does the scheduler go by priority


class Ask(Struct, frozen=True, kw_only=True):
    """An admitted request: every number is bounded, every id is inside the vocabulary."""

    prompts: list[str | list[int]] = []  # one, unless the dialect takes several
    messages: list[dict[str, Any]] | None = None  # instead of prompts: for the chat template
    arguments: dict[str, Any] = {}  # of the chat template
    field: str = "prompt"  # where the prompt stands in the body, for errors
    limit_field: str = "max_tokens"  # where its limit stands
    n: int = 1  # choices for each prompt
    max_tokens: int | None = None  # as the client gave it: too large is an error
    default_tokens: int | None = None  # when it gave none: cut to what the context has room for
    stops: tuple[str, ...] = ()
    sampling: Sampling = Sampling()  # its max_tokens is set when the prompt's length is known
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()  # fields that were taken and have no effect
    space: str = ""  # cache namespace of the authenticated tenant
    priority: int = 0  # the lower first


class Token(Struct, frozen=True):
    """One token of an answer, when logprobs are asked for."""

    id: int
    start: int  # characters of the answer before it
    logprob: Logprob


class Count(Struct, frozen=True):
    """Tokens of a whole request. `cached`: of the prompt, what the cache had before it came
    (None: the engine did not say)."""

    prompt: int
    output: int
    cached: int | None


class Delta(Struct):
    """More of one choice. The first ones of a request are empty, one for each choice: it was
    admitted. The last one is of no choice and has the usage."""

    index: int
    text: str = ""
    tokens: list[Token] = []  # those whose text is out, when logprobs are asked for
    finished: str | None = None  # "stop" or "length"
    usage: Count | None = None  # of the whole request
