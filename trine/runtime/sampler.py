"""Logits -> tokens, written in the table, and what the host hears of them, later.

It knows which slot asks for what; how a token is chosen is a kernel's business. Nothing here waits for the
device but `Pending.result`, and that for its own step only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from trine.core.types import Logprob, Result, Row
from trine.kernels.sampling.base import ERRORS, Chooser, Rows

from .staging import Report, Reports
from .table import Table

Masks = list[list[int] | None]


class Known(NamedTuple):
    """What was found out about the rows of a step, kept while the next one has the same."""

    slots: list[int]
    joined: int
    rows: Rows
    shown: list[int]  # rows that want logprobs
    most: int  # alternatives that any of them wants
    late: list[int]  # slots that have to have a number of tokens before they end


class Pending:
    """The result of one step, which may not be there yet."""

    def __init__(
        self, step: int, rows: int, places: Sequence[int], reports: Reports, counts: list[tuple[int, int]]
    ) -> None:
        self.step, self.rows, self.places, self.reports = step, rows, places, reports
        self.counts = counts  # rows that want logprobs, among those that sample, and how many alternatives
        self.said: list[Report] = []
        self.end: Any = None  # event: all of it is on the host

    def done(self) -> bool:
        """Whether `result` will not wait."""
        return self.end is None or self.end.done()

    def result(self) -> Result:
        """Waits for the device if it must. To be called once."""
        if self.end is not None:
            self.end.wait()
        result = Result(self.step, [[] for _ in range(self.rows)] if len(self.places) < self.rows else [])
        if not self.said:
            return result
        tokens, errors = self.said[0].array().tolist()
        if not result.tokens:
            result.tokens = [[token] for token in tokens]
        else:
            for i, token in zip(self.places, tokens, strict=True):
                result.tokens[i] = [token]
        if any(errors):
            named: list[str | None] = [None] * self.rows
            for i, error in zip(self.places, errors, strict=True):
                named[i] = ERRORS[error]
            result.errors = named
        if len(self.said) > 1:
            self._logprobs(result, tokens, errors)
        for report in self.said:
            self.reports.give(report)
        return result

    def _logprobs(self, result: Result, tokens: list[int], errors: list[int]) -> None:
        chances, ids = (report.array().tolist() for report in self.said[1:])
        found: list[list[Logprob]] = [[] for _ in range(self.rows)]
        for (row, count), values, names in zip(self.counts, chances, ids, strict=True):
            if not errors[row]:
                top = list(zip(names[1 : count + 1], values[1 : count + 1], strict=True))
                found[self.places[row]] = [Logprob(tokens[row], values[0], names[0], top)]
        if any(found):
            result.logprobs = found


class Sampler:
    """Samples for rows of the table."""

    def __init__(self, table: Table, kernel: Chooser, platform: Any = None) -> None:
        self.table = table
        self.kernel = kernel
        self.platform = platform
        self.reports = Reports(table.state.arena.device, platform)
        self.known: Known | None = None

    def sample(self, step: int, rows: list[Row], logits: Tensor, masks: Masks | None) -> Pending:
        """`logits` are of the rows that sample, `masks` are by row: the ids that are allowed."""
        slots = [row.slot for row in rows if row.sample]
        places = range(len(rows)) if len(slots) == len(rows) else [i for i, r in enumerate(rows) if r.sample]
        known = self._known(slots)
        pending = Pending(step, len(rows), places, self.reports, _counts(known, logits))
        if slots:
            self._choose(pending, known, logits, masks)
        if self.platform is not None and self.platform.asynchronous:
            pending.end = self.platform.event()
            pending.end.record()
        return pending

    def _choose(self, pending: Pending, known: Known, logits: Tensor, masks: Masks | None) -> None:
        table, asked = self.table, known.rows
        if known.late:
            asked = asked._replace(early=table.early(known.slots))
        if masks:
            by_row = {row: masks[i] for row, i in enumerate(pending.places)}
            allowed = {row: np.asarray(mask, np.int64) for row, mask in by_row.items() if mask is not None}
            asked = asked._replace(allowed=allowed)
        choice = self.kernel.choose(logits, asked)
        table.append(asked.slots, choice.tokens)
        table.grown(known.late)
        pending.said.append(self.reports.take(choice.said))
        if known.shown:
            most = min(known.most, logits.shape[1])
            seen = self.kernel.logprobs(logits, choice, known.shown, most, asked)
            pending.said += [self.reports.take(seen.chances), self.reports.take(seen.ids)]

    def _known(self, slots: list[int]) -> Known:
        known = self.known
        if known is None or known.joined != self.table.joined or known.slots != slots:
            rows = self.table.asked(slots)
            shown = [i for i, ask in enumerate(rows.asks) if ask.logprobs is not None]
            most = max((rows.asks[i].logprobs or 0 for i in shown), default=0)
            late = [slot for slot, ask in zip(slots, rows.asks, strict=True) if ask.wholes[2] > 0]
            known = self.known = Known(slots, self.table.joined, rows, shown, most, late)
        return known


def _counts(known: Known, logits: Tensor) -> list[tuple[int, int]]:
    return [(i, min(known.rows.asks[i].logprobs or 0, logits.shape[1])) for i in known.shown]
