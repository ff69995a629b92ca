"""The sampling fields that OpenAI's dialects share, with the extra ones that users of other engines
type, and how they become `Sampling`. Ranges are in the annotations: schema, checks and tests read them.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from trine.core.types import Sampling

from . import limits
from .admit import token_ids
from .ask import Facts
from .catalogue import Refusal

Stop = Annotated[str, Meta(min_length=1, max_length=limits.STOP_CHARACTERS)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARACTERS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31)]  # more than any context: admission gives the numbers


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`include_usage`: token counts in a last event of their own."""

    include_usage: bool = False
    include_obfuscation: bool = False  # known by name, to say that it is not there


class Controls(Struct, kw_only=True, forbid_unknown_fields=True):
    """Every field may be null: that is its default."""

    model: Name | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=limits.BIASED_IDS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=limits.CHOICES)] | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=limits.STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=limits.STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


# Fields of OpenAI that are taken, change nothing here, and are listed in the answer.
IGNORED = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)

# Fields whose effect is missing, and the values that ask for none.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "cache_salt": (),
    "add_special_tokens": (),
    "echo": (False,),
}

Given = TypeVar("Given")


def given(value: Given | None, default: Given) -> Given:
    """`value`, unless it was left out or null."""
    return default if value is None else value


def sampling(body: Controls, facts: Facts, logprobs: int | None) -> Sampling:
    """How tokens are chosen. Its `max_tokens` waits for the prompt's length."""
    top_k, top_p = max(0, given(body.top_k, 0)), given(body.top_p, 1.0)
    if top_p == 0.0:  # the smallest share that is not empty: the likeliest token alone
        top_k, top_p = 1, 1.0
    return Sampling(
        temperature=given(body.temperature, 1.0),
        top_p=top_p,
        top_k=min(top_k, facts.vocab),
        min_p=given(body.min_p, 0.0),
        repetition=given(body.repetition_penalty, 1.0),
        presence=given(body.presence_penalty, 0.0),
        frequency=given(body.frequency_penalty, 0.0),
        seed=None if body.seed is None else body.seed % 2**63,
        min_tokens=given(body.min_tokens, 0),
        stop_ids=tuple(token_ids(given(body.stop_token_ids, []), facts.vocab, "stop_token_ids")),
        ignore_eos=given(body.ignore_eos, False),
        logprobs=logprobs,
        bias=bias(given(body.logit_bias, {}), facts.vocab),
    )


def bias(entries: dict[str, float], vocab: int) -> dict[int, float]:
    """logit_bias with its keys as ids, written the one usual way."""
    found: dict[int, float] = {}
    for key, value in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
            raise Refusal("invalid_value", "logit_bias", wanted="an object whose keys are token ids")
        if not -100 <= value <= 100:
            raise Refusal("invalid_value", f"logit_bias.{key}", wanted="from -100 to 100")
        found[token_ids([int(key)], vocab, "logit_bias")[0]] = value
    return found


def stops(body: Controls) -> tuple[str, ...]:
    """The stop strings, each once."""
    found = [body.stop] if isinstance(body.stop, str) else given(body.stop, [])
    return tuple(dict.fromkeys(found))


def check(body: Controls, facts: Facts, limit: int | None) -> None:
    """What one field says about another."""
    if body.model is not None and body.model != facts.model:
        raise Refusal("model_not_found", "model")
    if body.stream_options is not None and not body.stream:
        raise Refusal("invalid_value", "stream_options", wanted="left out when stream is not true")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise Refusal("unsupported_field", "stream_options.include_obfuscation")
    if body.priority and not facts.ranked:
        raise Refusal(
            "invalid_value", "priority", wanted="0: this server does not run with --policy priority"
        )
    if limit is not None and given(body.min_tokens, 0) > limit:
        raise Refusal("invalid_value", "min_tokens", wanted=f"at most the {limit} tokens that may be made")
