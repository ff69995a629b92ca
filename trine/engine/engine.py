"""The bridge: plan, launch, commit the oldest, return what became known.

The one step that everything goes through. `depth` is how many batches may be in flight: 1 waits,
2 overlaps host and device. It knows the scheduler and an executor; no server, no process, no
torch. A step that failed on the device raises from `collect` and ends this engine: whoever holds
the requests replays them in another.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from trine.core.stats import StepStats
from trine.core.types import Batch, Output, Request, Row, Sequence, Status
from trine.executor.base import Executor
from trine.scheduler.scheduler import Scheduler

from .checks import check
from .grammars import Grammars


@dataclass(slots=True)
class Flight:
    """A batch that was launched and not committed."""

    batch: Batch
    seqs: list[Sequence]  # by row
    lives: list[int]  # of them, when it was launched
    sampled: bool = False  # False: its masks need tokens that are in flight
    first: bool = False  # after a time without work


class Engine:
    """`eos`: ids that end a text; a request stops at them unless it ignores them. `grammars` may be
    None: nothing is constrained."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        eos: Seq[int] = (),
        vocab: int,
        grammars: Grammars | None = None,
        depth: int = 1,
    ) -> None:
        self.scheduler, self.executor, self.grammars = scheduler, executor, grammars
        self.eos, self.vocab, self.depth = tuple(eos), vocab, depth
        self.flights: deque[Flight] = deque()
        self.outputs: list[Output] = []  # known without a step: aborts, and replays that were over
        self.latest = (0, 0, 0.0)  # rows, tokens, seconds of the last step committed
        self.idle = 0.0  # seconds that the device waited while there was work
        self.rested = True  # there was no work before the next launch
        if grammars is not None:
            scheduler.free = self._free

    # ---- asking -------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Take a request in; RequestError for one that can never run. Nothing in it is believed."""
        check(request, self.vocab)
        self.rested |= not (self.flights or self.scheduler.live)
        sampling = request.sampling
        stops = sampling.stop_ids if sampling.ignore_eos else (*sampling.stop_ids, *self.eos)
        seed = secrets.randbits(53) if sampling.seed is None else sampling.seed
        sampling = msgspec.structs.replace(sampling, stop_ids=tuple(dict.fromkeys(stops)), seed=seed)
        seq = self.scheduler.add(msgspec.structs.replace(request, sampling=sampling))
        if why := self.scheduler.over(seq):
            self.outputs.append(self.scheduler.last(seq, [], why))

    def abort(self, id: str) -> None:
        """Free all that a request holds; its last Output comes with the next step. Unknown ids are
        ignored."""
        if output := self.scheduler.abort(id):
            self.outputs.append(output)

    def flush(self) -> None:
        """Drop what the tree holds and nobody uses."""
        self.scheduler.cache.flush()

    # ---- stepping -----------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        """Whether there is work, or something to tell."""
        return bool(self.flights or self.scheduler.live or self.outputs)

    def step(self) -> list[Output]:
        """Launch one batch, commit the oldest one, return what became known."""
        if self.launch() and len(self.flights) < self.depth:
            return self._told()
        return self.collect()

    def launch(self) -> bool:
        """Schedule and enqueue one batch, if there is room in flight; whether there was one."""
        flights = self.flights
        if len(flights) >= self.depth or (flights and not flights[-1].sampled):
            return False  # what is not sampled yet would be told of tenants that came after it
        planned = self.scheduler.schedule()
        if planned is None:
            return False
        batch, seqs = planned
        flight = Flight(batch, seqs, [seq.life for seq in seqs], first=self.rested)
        self.rested = False
        self.executor.forward(batch)
        flights.append(flight)
        if len(flights) == 1 or not self._masked(flight):
            self._sample(flight)
        return True

    def ready(self) -> bool:
        """Whether `collect` would return something, or raise, without waiting."""
        if self.flights:
            return self.executor.done(self.flights[0].batch.step)
        return bool(self.outputs)

    def collect(self) -> list[Output]:
        """Commit the oldest batch, waiting for it; what became known."""
        if not self.flights:
            return self._told()
        flight = self.flights[0]
        rows = flight.batch.rows
        result = self.executor.result(flight.batch.step)
        self.flights.popleft()
        outputs = self.scheduler.commit(rows, flight.seqs, flight.lives, result)
        self.latest = len(rows), sum(row.count for row in rows), result.seconds
        if not flight.first:
            self.idle += result.idle
        if self.flights and not self.flights[0].sampled:
            self._sample(self.flights[0])  # its masks needed the tokens just seen
        return self._told() + outputs if self.outputs else outputs

    def stats(self) -> StepStats:
        """Counters, memory, and the last step."""
        return self.scheduler.stats(*self.latest, self.idle)

    # ---- inside -------------------------------------------------------------------------
    def _told(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def _free(self, seq: Sequence) -> int:
        assert self.grammars is not None
        return self.grammars.free(seq.request, _output(seq))

    def _masked(self, flight: Flight) -> bool:
        """Whether a row needs a mask that depends on tokens in flight."""
        if self.grammars is None:
            return False
        rows = zip(flight.batch.rows, flight.seqs, strict=True)
        return any(row.sample and self._free(seq) < seq.promised for row, seq in rows)

    def _sample(self, flight: Flight) -> None:
        """Enqueue the sampling; every token before it was seen, or no grammar asks for it."""
        flight.sampled = True
        masks = None
        if self.grammars is not None:
            rows = zip(flight.batch.rows, flight.seqs, flight.lives, strict=True)
            masks = [self._mask(row, seq, life) for row, seq, life in rows]
        self.executor.sample(flight.batch, masks)

    def _mask(self, row: Row, seq: Sequence, life: int) -> list[int] | None:
        """What a row may sample. If more is forced after it, those tokens are known already: the gap
        becomes larger, and the next row longer."""
        assert self.grammars is not None
        if not row.sample or seq.status is Status.FINISHED:
            return None
        output, here = _output(seq), 1 + row.drafts
        free = self.grammars.free(seq.request, output)
        if free >= seq.promised and (seq.promised > here or free >= seq.limit - len(seq.tokens)):
            return None  # not all before it was seen, and it does not matter
        allowed, forced = self.grammars.next(seq.request, output)
        alone = seq.promised == 1 and seq.status is Status.RUNNING and seq.life == life
        if forced and alone and seq.request.sampling.logprobs is None:  # forced ones have no logprobs
            seq.ahead = forced[: seq.limit - len(seq.tokens) - 1]
            seq.unsent = seq.ahead[:]
        return allowed


def _output(seq: Sequence) -> array[int]:
    return seq.tokens[seq.request.prompt :]
