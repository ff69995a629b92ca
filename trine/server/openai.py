"""What the answers of OpenAI's dialects share: usage, and how a token is spelled."""

from __future__ import annotations

import math

from msgspec import UNSET, Struct, UnsetType

from .ask import Ask, Count

LOWEST = -9999.0  # what stands for a logprob of minus infinity, which JSON has not


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


def counted(count: Count) -> Usage:
    """`prompt_tokens_details` is left out when the engine did not say what was cached."""
    details = UNSET if count.cached is None else PromptDetails(count.cached)
    return Usage(count.prompt, count.output, count.prompt + count.output, details)


def no_usage(ask: Ask) -> UnsetType | None:
    """What events before the last say of usage: null if it is to come."""
    return None if ask.include_usage else UNSET


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


def spelled(raw: bytes) -> str:
    """A token's bytes as text; half characters become the replacement character."""
    return raw.decode("utf-8", "replace")
