"""The seam for constrained output: what the engine asks about the tokens that may come next.

Which request has a grammar, and what a grammar is, only the object behind this protocol knows.
It is asked on the host, between two steps, with tokens that were seen, never with promised ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from trine.core.types import Request


class Next(NamedTuple):
    """What may follow an output."""

    allowed: list[int] | None = None  # ids for the next token; None: all
    forced: list[int] = []  # ids that must follow *after* that token, whatever it is of `allowed`


class Grammars(Protocol):
    """Asked for each request; one without a grammar is never constrained."""

    def free(self, request: Request, output: Sequence[int]) -> int:
        """How many tokens after `output` are surely unconstrained, whatever each of them is.

        0: the next token has a mask (or its mask is not known yet). A request without a grammar:
        any large number. Rows that sample within it need no late mask and may carry drafts."""
        ...

    def next(self, request: Request, output: Sequence[int]) -> Next:
        """The mask of the next token, and what is forced after it. `output` is all that was seen."""
        ...
