"""The engine's own look at a request: whoever sent it, nothing in it is believed.

Every number must be finite and in range and every id inside the vocabulary, or a RequestError names
the field. It never asserts on request data, and it does not know what fits: the scheduler does.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

from trine.core.types import Request, Sampling
from trine.errors import RequestError

STOPS, BIASES, LOGPROBS = 128, 1024, 20  # at most; stops: a client's 64, and the model's own

# field: (least, most), both allowed
FLOATS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition": (0.01, 100.0),
    "presence": (-2.0, 2.0),
    "frequency": (-2.0, 2.0),
}
INTEGERS = {
    "top_k": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
}


def check(request: Request, vocab: int) -> None:
    """RequestError if anything in it cannot be."""
    if not isinstance(request.id, str) or not 0 < len(request.id) <= 128:
        raise RequestError("an id has 1 to 128 characters", "id")
    if not isinstance(request.space, str) or len(request.space) > 256:
        raise RequestError("a space has at most 256 characters", "space")
    _ids(request.tokens, vocab, "tokens")
    if not request.tokens:
        raise RequestError("the prompt has no tokens", "tokens")
    _integer(request.emitted, 0, len(request.tokens) - 1, "emitted")
    _integer(request.priority, -(2**31), 2**31 - 1, "priority")
    _number(request.arrived, -math.inf, math.inf, "arrived")
    if not isinstance(request.sampling, Sampling):
        raise RequestError("sampling is not a Sampling", "sampling")
    _sampling(request.sampling, vocab)


def _sampling(sampling: Sampling, vocab: int) -> None:
    for name, (least, most) in FLOATS.items():
        _number(getattr(sampling, name), least, most, f"sampling.{name}")
    for name, (least, most) in INTEGERS.items():
        _integer(getattr(sampling, name), least, most, f"sampling.{name}")
    if sampling.top_p == 0:
        raise RequestError("top_p is 0, which leaves no token; it is above 0 and at most 1", "sampling.top_p")
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens {sampling.min_tokens} is above max_tokens {sampling.max_tokens}",
            "sampling.min_tokens",
        )
    if sampling.seed is not None:
        _integer(sampling.seed, -(2**63), 2**63 - 1, "sampling.seed")
    if sampling.logprobs is not None:
        _integer(sampling.logprobs, 0, LOGPROBS, "sampling.logprobs")
    _few(sampling.stop_ids, (tuple, list), STOPS, "sampling.stop_ids")
    _ids(list(sampling.stop_ids), vocab, "sampling.stop_ids")
    _few(sampling.bias, (dict,), BIASES, "sampling.bias")
    _ids(list(sampling.bias), vocab, "sampling.bias")
    for value in sampling.bias.values():
        _number(value, -100.0, 100.0, "sampling.bias")


def _ids(ids: Any, vocab: int, field: str) -> None:
    """Token ids: integers in [0, vocab). Made for long prompts: all in C."""
    if not isinstance(ids, (list, tuple)):
        raise RequestError(f"{field}: a list of token ids is wanted", field)
    try:
        known = array("i", ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"{field}: token ids are integers in [0, {vocab}): {error}", field) from None
    if known and (min(known) < 0 or max(known) >= vocab):
        wrong = next(t for t in known if not 0 <= t < vocab)
        raise RequestError(f"{field}: token id {wrong} is not in [0, {vocab})", field)


def _number(value: Any, least: float, most: float, field: str) -> None:
    if type(value) not in (float, int) or not math.isfinite(value) or not least <= value <= most:
        raise RequestError(f"{field}: {value!r} is not a finite number in [{least}, {most}]", field)


def _integer(value: Any, least: int, most: int, field: str) -> None:
    if type(value) is not int or not least <= value <= most:
        raise RequestError(f"{field}: {value!r} is not an integer in [{least}, {most}]", field)


def _few(values: Any, kinds: tuple[type, ...], most: int, field: str) -> None:
    if not isinstance(values, kinds) or len(values) > most:
        raise RequestError(f"{field}: at most {most} of them", field)
