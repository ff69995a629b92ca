"""Toy grammars: rules small enough that the oracle and the engine's seam can share them.

Rule 0: no grammar. Rule 1 forces three tokens after a free one that is a multiple of 5. Rule 2
leaves a choice of three after a multiple of 3. Rule 3 does both. Rule 4 forces the last three of
each eight output tokens, so it can be guessed ahead, and forced before the token between is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from trine.core.types import Request
from trine.engine.grammars import Next

FREE = 1 << 30
END = [9, 11, 13]


def allowed(rule: int, out: Sequence[int]) -> list[int] | None:
    """The ids that may follow the output so far; None: all."""
    if rule == 4:
        place = len(out) % 8
        return [END[place - 5]] if place >= 5 else None
    run: list[int] = []  # what must still follow
    for token in out:
        if run:
            run = run[1:]
        elif rule & 1 and token % 5 == 0:
            run = [(token + 1) % 32 | 1, 11, 13]
    if run:
        return run[:1]
    if rule & 2 and out and out[-1] % 3 == 0:
        return [1, 2, 4]
    return None


def forced(rule: int, out: Sequence[int]) -> list[int]:
    """The tokens that must come next, whatever the model thinks."""
    run: list[int] = []
    while (ids := allowed(rule, [*out, *run])) is not None and len(ids) == 1:
        run += ids
    return run


class ToyGrammars:
    """The engine's seam for grammars, by the rule of each request's id."""

    def __init__(self) -> None:
        self.rules: dict[str, int] = {}

    def free(self, request: Request, output: Sequence[int]) -> int:
        rule = self.rules.get(request.id, 0)
        if rule == 0:
            return FREE
        if rule == 4:
            return max(0, 4 - len(output) % 8)  # with 4, `next` tells what follows the one between
        return int(rule != 3 and allowed(rule, output) is None)  # rule 3 never says in advance

    def next(self, request: Request, output: Sequence[int]) -> Next:
        rule = self.rules.get(request.id, 0)
        if rule == 4 and len(output) % 8 == 4:
            return Next(None, END)
        run = forced(rule, output)
        return Next(run[:1], run[1:]) if run else Next(allowed(rule, output))
