"""OpenAI's completions: one prompt or many, texts or token ids."""

from __future__ import annotations

from typing import Annotated, cast

from msgspec import UNSET, Meta, Struct, UnsetType

from trine.server import limits
from trine.server.admit import token_ids
from trine.server.ask import Ask, Count, Delta, Facts, Token
from trine.server.catalogue import Refusal
from trine.server.controls import IGNORED, UNSUPPORTED, Controls, check, given, sampling, stops
from trine.server.infer import Head, route
from trine.server.openai import Usage, counted, finite, no_usage, spelled

DEFAULT_TOKENS = 16  # OpenAI's, when max_tokens is left out


class CompletionBody(Controls, kw_only=True, forbid_unknown_fields=True):
    """The body of a completion. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=limits.LOGPROBS)] | None = None


class Logprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(Struct, frozen=True):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, frozen=True):
    """A completion, and an event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class Completions:
    """The dialect."""

    path = "/v1/completions"
    about = "What follows a text; with stream, as server-sent events."
    prefix = "cmpl"
    schema, answer = CompletionBody, Completion
    ignored = IGNORED
    unsupported = {**UNSUPPORTED, "suffix": ("",), "store": (False,)}

    def ask(self, body: CompletionBody, facts: Facts) -> Ask:
        """An Ask for every prompt."""
        check(body, facts, given(body.max_tokens, DEFAULT_TOKENS))
        found, n = prompts(body.prompt, facts), given(body.n, 1)
        if len(found) * n > limits.PROMPTS:
            raise Refusal("too_many_choices", "prompt", asked=len(found) * n, limit=limits.PROMPTS)
        return Ask(
            prompts=found,
            field="prompt",
            n=n,
            max_tokens=body.max_tokens,
            default_tokens=DEFAULT_TOKENS,
            stops=stops(body),
            sampling=sampling(body, facts, body.logprobs),
            priority=given(body.priority, 0),
            stream=given(body.stream, False),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )

    def opening(self, head: Head, ask: Ask) -> list[Struct]:
        """Nothing but that the prompt was taken."""
        return [_completion(head, [Choice(0, "")], no_usage(ask))]

    def events(self, head: Head, ask: Ask, delta: Delta) -> list[Struct]:
        """Text with the reason of its end, then the usage."""
        if delta.usage:
            return [_completion(head, [], counted(delta.usage))] if ask.include_usage else []
        if not (delta.text or delta.tokens or delta.finished):
            return []
        shown = logprobs(head, ask, delta.tokens)
        return [_completion(head, [Choice(delta.index, delta.text, shown, delta.finished)], no_usage(ask))]

    def whole(self, head: Head, ask: Ask, choices: list[Delta], usage: Count) -> Struct:
        """The completion in one body."""
        found = [
            Choice(one.index, one.text, logprobs(head, ask, one.tokens), one.finished) for one in choices
        ]
        return _completion(head, found, counted(usage))


def prompts(given: str | list[str | int | list[int]], facts: Facts) -> list[str | list[int]]:
    """The prompts of a body, each a text or ids inside the vocabulary."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise Refusal("empty_prompt", "prompt")
    kinds = set(map(type, given))  # a list may be long: it is looked at once
    if kinds == {int}:
        return [token_ids(cast(list[int], given), facts.vocab, "prompt")]
    if kinds == {str}:
        return cast(list[str | list[int]], given)
    if kinds == {list}:
        lists = cast(list[list[int]], given)
        return [token_ids(one, facts.vocab, f"prompt[{i}]") for i, one in enumerate(lists)]
    raise Refusal("invalid_value", "prompt", wanted="of one kind: texts, token ids, or lists of token ids")


def logprobs(head: Head, ask: Ask, tokens: list[Token]) -> Logprobs | None:
    """The logprobs of a choice or of a piece of it, if they were asked for."""
    if ask.sampling.logprobs is None:
        return None
    return Logprobs(
        [spelled(head.spell(token.id)) for token in tokens],
        [finite(token.logprob.logprob) for token in tokens],
        [{spelled(head.spell(id)): finite(logprob) for id, logprob in token.logprob.top} for token in tokens],
        [token.start for token in tokens],
    )


def _completion(head: Head, choices: list[Choice], usage: Usage | UnsetType | None) -> Completion:
    return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)


PLUGIN = (route(Completions()),)
