"""Who goes back into the engine after it died (rules S6 and S7). Pure decisions: no process, no clock.

A face keeps, for each live request, the tokens its client has: a lost engine loses nothing, since
prompt plus emitted tokens and the seed say all. If requests die with the engine twice without
progress, one of them may be what kills it: the suspects go in alone, half of them, then half
of that half, with everybody else held back, until one stands by itself. Only a request that was
alone in the engine is ever given up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from trine.core.types import Output, Request, Usage

CLEAR_TOKENS = 4  # new tokens after which a request is no suspect: more than flights can hold back
LONELY_DEATHS = 8  # in a row, for deaths that somebody outside may have caused: kill -9, a freeze
POISONED = "the engine failed each time it ran this request; other requests are not affected"


@dataclass(slots=True, eq=False)
class Record:
    """One live request, as its client knows it."""

    request: Request
    emitted: list[int] = field(default_factory=list)
    inside: bool = False  # the engine of this life has it
    aborted: bool = False
    strikes: int = 0  # deaths it was inside for, since it made progress
    lonely: int = 0  # of those, with nobody else inside
    fresh: int = 0  # tokens since it last went in
    cached: int | None = None  # what was found in the cache, when the first token came

    def again(self) -> Request:
        """What to send: the client's own request, or its continuation."""
        if not self.emitted:
            return self.request
        return msgspec.structs.replace(
            self.request,
            tokens=[*self.request.tokens, *self.emitted],
            emitted=self.request.emitted + len(self.emitted),
        )

    def usage(self, last: Usage | None = None) -> Usage:
        """Of the client's request, however many lives it took."""
        found = self.cached if self.cached is not None else last.cached if last else 0
        return Usage(
            prompt=self.request.prompt,
            cached=min(found, self.request.prompt),
            output=self.request.emitted + len(self.emitted),
            preemptions=last.preemptions if last else 0,
        )


class Replay:
    """The live requests. `due` says whom to send; `died` takes everybody back."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}  # in order of arrival
        self.barren = 0  # deaths in a row without a single token between them
        self.poisoned = 0
        self.late = 0  # outputs for requests that are not live
        self._outside: dict[str, Record] = {}
        self._trial: set[str] = set()  # suspects that are inside and have not made progress
        self._groups: deque[list[str]] = deque()  # suspects whose turn comes later

    def add(self, request: Request) -> Record:
        record = Record(request)
        self.records[request.id] = self._outside[request.id] = record
        return record

    def drop(self, id: str) -> Record | None:
        """The client is gone."""
        self._outside.pop(id, None)
        self._trial.discard(id)
        return self.records.pop(id, None)

    def due(self) -> list[Request]:
        """Requests to be sent now, in order; they count as inside from here on."""
        if not self._outside:
            return []
        while self._groups and not self._trial:
            self._trial = {id for id in self._groups.popleft() if id in self._outside}
        now = [r for id, r in self._outside.items() if not self._trial or id in self._trial]
        for record in now:
            record.inside, record.fresh = True, 0
            del self._outside[record.request.id]
        return [record.again() for record in now]

    def take(self, output: Output) -> Output | None:
        """Note what the engine said; what the client should hear, None for nobody's output."""
        record = self.records.get(output.id)
        if record is None or not record.inside:
            self.late += 1
            return None
        if output.usage and record.cached is None and not record.emitted:
            record.cached = output.usage.cached
        record.emitted += output.tokens
        record.fresh += len(output.tokens)
        if output.tokens:
            self.barren = 0
        if output.finished:
            self.drop(output.id)
            return msgspec.structs.replace(output, usage=record.usage(output.usage))
        if record.fresh >= CLEAR_TOKENS:
            record.strikes = record.lonely = 0
            self._trial.discard(output.id)
        return msgspec.structs.replace(output, usage=None) if output.usage else output

    def died(self, blamed: bool) -> list[Output]:
        """Everybody comes back. `blamed`: a step raised or crashed, so nobody outside did it.

        Last Outputs of those that do not go on: aborted meanwhile, or alone with a dead engine."""
        inside = [record for record in self.records.values() if record.inside]
        self.barren += bool(inside)
        for record in inside:
            record.inside = False
            record.strikes += 1
        self._outside = dict(self.records)
        self._trial.clear()
        ends = [self._end(record, "abort") for record in inside if record.aborted]
        suspects = [r for r in inside if r.strikes > 1 and not r.aborted]
        if len(inside) == 1 and suspects:
            only = suspects[0]
            only.lonely += 1
            if blamed or only.lonely >= LONELY_DEATHS:
                self.poisoned += 1
                self.barren = 0  # the culprit is found, so the next engine has a better chance
                return [*ends, self._end(only, "error", POISONED)]
        self._halve([record.request.id for record in suspects])
        return ends

    def _halve(self, suspects: list[str]) -> None:
        """The first half goes in by itself; then the other, when the first has made progress."""
        half = (len(suspects) + 1) // 2
        for group in (suspects[half:], suspects[:half]):
            if group:
                self._groups.appendleft(group)

    def _end(self, record: Record, finished: str, error: str | None = None) -> Output:
        self.drop(record.request.id)
        return Output(record.request.id, [], finished=finished, usage=record.usage(), error=error)
