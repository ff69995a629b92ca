"""Logits -> tokens, written in the table, and what the host hears of them.

It knows which slot asks for what; how a token is chosen is a kernel's business.
"""

from __future__ import annotations

from torch import Tensor

from trine.core.types import Logprob, Result, Row
from trine.kernels.sampling.base import Chooser

from .table import Table


class Sampler:
    """Samples for rows of the table."""

    def __init__(self, table: Table, kernel: Chooser) -> None:
        self.table = table
        self.kernel = kernel

    def sample(
        self, step: int, rows: list[Row], logits: Tensor, masks: list[list[int] | None] | None
    ) -> Result:
        """`logits` are of the rows that sample, `masks` are by row: the ids that are allowed."""
        result = Result(step, [[] for _ in rows])
        places = [i for i, row in enumerate(rows) if row.sample]
        if not places:
            return result
        slots = [rows[i].slot for i in places]
        asked = self.table.rows(slots, [masks[i] if masks else None for i in places])
        choice = self.kernel.choose(logits, asked)
        self.table.append(slots, choice.tokens)
        tokens = choice.tokens.tolist()
        for i, token in zip(places, tokens, strict=True):
            result.tokens[i] = [token]
        if any(choice.errors):
            result.errors = _spread(choice.errors, places, len(rows))
        counts = self.table.logprobs(slots)
        counts = [None if error else n for n, error in zip(counts, choice.errors, strict=True)]
        if any(count is not None for count in counts):
            seen = self.kernel.logprobs(logits, tokens, counts)
            found = [[Logprob(token, *s)] if s else [] for token, s in zip(tokens, seen, strict=True)]
            result.logprobs = [[] for _ in rows]
            for i, value in zip(places, found, strict=True):
                result.logprobs[i] = value
        return result


def _spread(errors: list[str | None], places: list[int], rows: int) -> list[str | None]:
    """From rows that sample to all rows."""
    by_row: list[str | None] = [None] * rows
    for i, error in zip(places, errors, strict=True):
        by_row[i] = error
    return by_row
