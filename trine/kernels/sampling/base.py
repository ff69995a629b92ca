"""The contract of choosing tokens: what is asked of each row, and what comes back.

Order of work, the same for every backend (it is the order of vLLM, so that settings carried
over mean the same thing): allowed ids, min_tokens, bias, repetition, frequency, presence;
then, unless the row is greedy, temperature, min_p, top_k, top_p; then the draw. Logprobs are
of the model's own distribution, before all of these.

It knows nothing of slots, pages or requests.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
WHOLES = ("top_k", "seed", "min_tokens")


class Rows(NamedTuple):
    """What is asked, by row. Everything a row's answer depends on is in its own entries."""

    reals: Tensor  # [rows, len(REALS)] float64
    wholes: Tensor  # [rows, len(WHOLES)] int64
    position: Tensor  # [rows] int64  index in its sequence of the token to choose
    prompt: Tensor  # [rows] int64  how many of its tokens are not output
    tokens: list[Tensor]  # by row [at least position] int32  its tokens so far
    stops: list[Tensor]  # by row [n] int64  ids that end it
    bias: list[tuple[Tensor, Tensor] | None]  # by row ids [n] int64, what to add [n] float32
    allowed: list[Tensor | None]  # by row [n] int64  ids it may choose; None: all


class Choice(NamedTuple):
    """The chosen ids, and by row why nothing could be chosen (its id is then 0)."""

    tokens: Tensor  # [rows] int64
    errors: list[str | None]


class Seen(NamedTuple):
    """How the model itself saw a token: rank is from 1, `top` is likeliest first."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Chooser(Protocol):
    """A way to choose. A row's answer never depends on its neighbours, in any bit."""

    name: str

    def choose(self, logits: Tensor, rows: Rows) -> Choice:
        """logits: [rows, vocab] float32, not changed. Logits that are not finite count as never."""
        ...

    def logprobs(self, logits: Tensor, tokens: list[int], counts: list[int | None]) -> list[Seen | None]:
        """Of each row's token, with `counts` alternatives; None where None is asked."""
        ...
