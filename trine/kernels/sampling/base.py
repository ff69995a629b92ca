"""The contract of choosing tokens: what is asked of each row, and what comes back.

Order of work, the same for every backend (it is the order of vLLM, so that settings carried
over mean the same thing): allowed ids, min_tokens, bias, repetition, frequency, presence;
then, unless the row is greedy, temperature, min_p, top_k, top_p; then the draw. Logprobs are
of the model's own distribution, before all of these.

Nobody waits for the device: what a row asks for is known on the host too, which chooses the path; numbers
that change as tokens come are read on the device, by slot. It knows nothing of pages or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trine.kernels.table.base import REALS, WHOLES, State

__all__ = ["ERRORS", "REALS", "WHOLES", "Ask", "Choice", "Chooser", "Rows", "Seen"]

ERRORS = (None, "no token is allowed", "no finite logit")  # by code

Ids = NDArray[np.int64]


class Ask(NamedTuple):
    """What one tenant asks, as its host knows it."""

    reals: tuple[float, ...]  # REALS
    wholes: tuple[int, ...]  # WHOLES
    stops: Ids  # [n] ids that end it
    bias: tuple[Ids, NDArray[np.float32]] | None  # ids [n], what to add [n]
    logprobs: int | None  # alternatives to see; None: not even the chosen one's
    draws: bool  # it is not greedy
    filters: bool  # top_k, top_p or min_p do something
    penalties: bool  # repetition, presence or frequency do something
    prompt: int = 0  # tokens that are not output


class Rows(NamedTuple):
    """What is asked, by row. Everything a row's answer depends on is in its own slot and entries."""

    state: State  # of all slots, on the device
    slots: Tensor  # [rows] indices
    asks: list[Ask]
    early: list[int]  # rows that may be too early to end: the device knows
    allowed: dict[int, Ids]  # by row: ids it may choose; not in it: all
    upload: Callable[[Any], Tensor]  # whole numbers [n] to the device, as indices


class Choice(NamedTuple):
    """The chosen ids, and by row why nothing could be chosen (its id is then 0)."""

    said: Tensor  # [2, rows] int32: ids, codes of ERRORS

    @property
    def tokens(self) -> Tensor:
        return self.said[0]

    @property
    def errors(self) -> Tensor:
        return self.said[1]


class Seen(NamedTuple):
    """How the model itself saw tokens, of the rows that asked. Alternatives are likeliest first; of equals
    the lowest id."""

    chances: Tensor  # [rows, 1 + most] float32: of the token, then of the alternatives
    ids: Tensor  # [rows, 1 + most] int32: the token's rank from 1, then the alternatives


class Chooser(Protocol):
    """A way to choose. A row's answer never depends on its neighbours, in any bit."""

    name: str
    order: int

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        """`want.device`: "cpu", "cuda", ..."""
        ...

    def choose(self, logits: Tensor, rows: Rows) -> Choice:
        """logits: [rows, vocab], not changed. Logits that are not finite count as never. A choice holds for at
        least three more calls."""
        ...

    def logprobs(self, logits: Tensor, choice: Choice, which: list[int], most: int, rows: Rows) -> Seen:
        """Of the chosen tokens of the rows `which`, with `most` alternatives each (at most the vocabulary)."""
        ...
