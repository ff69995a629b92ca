"""Who runs in the next step, and what became of the last one.

One rule: a sequence has tokens, some of which have KV; each step hands out a budget of tokens to
close the gap. Prompts, chunks, single tokens, forced tokens and drafts are all gap. It knows no
device and no clock; pages it knows only through the cache's door.

Both lists are kept by ticket, the order of arrival. Whoever lacks pages preempts those that come
after it in the policy's order only, so the first always goes on, and a sequence that fits the empty
pool always finishes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice, repeat

from msgspec.structs import replace

from trine.cache.manager import Cache, Change
from trine.cache.pages import PagePool
from trine.core.stats import StepStats
from trine.core.types import (
    Batch,
    Grant,
    Join,
    Logprob,
    Output,
    Request,
    Result,
    Row,
    Sequence,
    Share,
    Status,
    Usage,
    Write,
)
from trine.errors import RequestError

from .mix import Mix
from .policies.base import LOOK, Policy
from .work import Counts, Work


class Scheduler:
    """`slots`: without slot 0, which is never given out. `mix`: how prompts ride with rows of one
    token; None: they take what is left of the budget. `free`: set by an engine with grammars, how
    many tokens after those seen are unconstrained."""

    def __init__(
        self,
        cache: Cache,
        *,
        slots: int,
        budget: int,
        max_len: int,
        policy: Policy,
        capacity: str = "max-use",
        drafts: int = 0,
        mix: Mix | None = None,
    ) -> None:
        self.cache, self.policy, self.mix = cache, policy, mix
        self.budget, self.max_len, self.drafts = budget, max_len, drafts
        self.sure = capacity == "no-evict"  # admit only what surely fits; never preempt
        self.slots = list(range(slots, 0, -1))
        self.live: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []  # by ticket
        self.running: list[Sequence] = []  # by ticket
        self.opening: set[Sequence] = set()  # of those that run: it is not planned yet that they sample
        self.fixes: list[Grant] = []  # corrections for the next batch
        self.told: list[Share] = []  # what is in force on the device
        self.bonds = cache.bonds  # the cache's when that was found
        self.free: Callable[[Sequence], int] | None = None
        self.counts = Counts()
        self.step = 0
        self.tickets = 0
        self.stuck = -1  # the cache's `gains` when the first to be admitted did not fit

    # ---- coming and going ---------------------------------------------------------------
    def add(self, request: Request) -> Sequence:
        """A new sequence; RequestError for what can never run. A replay that has all it may have
        is FINISHED at once."""
        if request.id in self.live:
            raise RequestError(f"a request with the id {request.id!r} is alive already", "id", 409)
        limit = self._limit(request)
        self.tickets += 1
        seq = Sequence(request, array("i", request.tokens), ticket=self.tickets, limit=limit)
        if request.emitted and self._why(seq, request.tokens[-1]):
            seq.status = Status.FINISHED
            self.counts.finished += 1
            return seq
        self.live[request.id] = seq
        self.waiting.append(seq)
        self.stuck = -1
        return seq

    def abort(self, id: str) -> Output | None:
        """Free all it holds, now. Late results of its flights will be dropped."""
        if (seq := self.live.get(id)) is None:
            return None
        self._end(seq)
        self.counts.aborted += 1
        return self.last(seq, [], "abort")

    def last(
        self, seq: Sequence, tokens: list[int], why: str, logprobs: list[Logprob] | None = None
    ) -> Output:
        """The last output of a sequence, with its counts."""
        prompt = seq.request.prompt
        usage = Usage(prompt, seq.cached, len(seq.tokens) - prompt, seq.life)
        return Output(seq.request.id, tokens, why, logprobs, usage)

    def over(self, seq: Sequence) -> str | None:
        """Why a replay is over with the tokens it came with; None if it is not."""
        return self._why(seq, seq.tokens[-1]) if seq.request.emitted else None

    def _limit(self, request: Request) -> int:
        prompt, most = request.prompt, request.sampling.max_tokens
        if prompt >= self.max_len:
            raise RequestError(
                f"the prompt has {prompt} tokens, and the context holds {self.max_len}, of which one at "
                f"least is for output: it is {prompt - self.max_len + 1} too long",
                "tokens",
            )
        limit = min(prompt + most, self.max_len)
        for need, pages in self.cache.smallest(limit - 1):
            if need > pages:
                raise RequestError(
                    f"a prompt of {prompt} tokens with up to {limit - prompt} of output needs {need} pages "
                    f"of {self.cache.size} tokens, and there are {pages}",
                    "max_tokens",
                )
        return limit

    # ---- the next batch -----------------------------------------------------------------
    def schedule(self) -> tuple[Batch, list[Sequence]] | None:
        """Orders for one step, and the sequences of its rows; None if nobody can go on now."""
        work = Work(self.budget, self.fixes)
        self.fixes = []
        if self.mix is not None:
            self._ration(work, self.mix)
        self._run(work)
        if self.waiting and self.slots and work.left > 0 and not work.preempted:
            self._admit(work)
        if not work.rows:
            self.fixes = work.grants
            return None
        self.step += 1
        batch = Batch(self.step, work.rows, work.joins, work.copies, work.grants, work.writes)
        if self.bonds != self.cache.bonds:
            batch.shares = self._shares()
        return batch, work.seqs

    def _shares(self) -> list[Share] | None:
        """What those that run have in common now; None if that is what the device was told last."""
        self.bonds = self.cache.bonds
        now = self.cache.shares(self.running)
        if now == self.told:
            return None
        self.told = now
        return now

    def _ration(self, work: Work, mix: Mix) -> None:
        """If there are rows of one token: what they need of the budget, and the work that prompts may add."""
        steady = len(self.running) - len(self.opening)
        prompts = len(self.opening)
        if self.stuck != self.cache.gains:  # else nobody is admitted
            prompts += min(len(self.waiting), len(self.slots))
        if steady and prompts:
            work.mix, work.room, work.kept = mix, float(mix.ridge * prompts), steady * (1 + self.drafts)

    def _run(self, work: Work) -> None:
        """Rows for those that run."""
        left, rows, seqs, size = work.left, work.rows, work.seqs, self.cache.size
        opening, each = self.opening, 0 if work.mix is None else 1 + self.drafts
        running = Status.RUNNING
        for seq in self.policy.running(self.running):
            if left <= 0:
                break
            planned = seq.planned
            length = len(seq.tokens) + seq.promised + len(seq.ahead)
            count = length - planned
            if count <= 0 or length >= seq.limit or seq.status is not running:
                continue  # all that may come is in flight, or it was preempted just now
            drafts = 0
            opens = bool(opening) and seq in opening
            if opens:
                work.left = left
                if not (count := work.chunk(planned, count)):
                    continue
            elif count > left:
                count = left
            elif self.drafts and count == 1 and seq.guessed:
                drafts = self._drafts(seq, length, left)
            if planned + count + drafts > len(seq.pages[0]) * size:
                count, drafts = self._pages(work, seq, count, drafts)
                if count == 0:
                    continue
            if seq.unsent:
                work.writes.append(Write(seq.slot, seq.unsent))
                seq.unsent = []
                seq.guessed = False  # its guesses came after other tokens
            if opens:
                work.took(planned, count)
            elif each:
                work.kept -= each
            planned += count
            sample = planned == length
            rows.append(Row(seq.slot, count + drafts, sample, drafts))
            seqs.append(seq)
            seq.planned = planned + drafts
            if sample:
                seq.promised += 1 + drafts
                seq.guessed = True
                if opens:
                    opening.remove(seq)
            left -= count + drafts
        work.left, work.kept = left, 0

    def _drafts(self, seq: Sequence, length: int, left: int) -> int:
        """Guesses that may ride along with the one known token of a row."""
        drafts = min(self.drafts, left - 1, seq.limit - 1 - length)
        if drafts > 0 and self.free is not None:
            drafts = min(drafts, self.free(seq) - seq.promised - 1)
        return max(0, drafts)

    def _pages(self, work: Work, seq: Sequence, count: int, drafts: int) -> tuple[int, int]:
        """Get pages for a row, from younger ones if need be; the row shrinks to what there is."""
        cache, planned = self.cache, seq.planned
        others = self._others(work, seq) if self.sure and cache.windows else None
        most = None if others is None else self._most(others, seq)
        while (reach := cache.fit(seq, planned + count + drafts, most)) <= planned:
            victim = None if self.sure else self.policy.victim(self.running, seq)
            if victim is None or victim in work.seqs:
                return 0, 0
            self._preempt(victim, work)
        count = min(count, reach - planned)
        drafts = min(drafts, reach - planned - count)
        changes = cache.extend(seq, planned + count + drafts)
        assert changes is not None
        work.grants += [Grant(seq.slot, *change) for change in changes]
        if others is not None:
            work.owed = [other + self._claim(seq, group) for group, other in enumerate(others)]
        return count, drafts

    # ---- making room --------------------------------------------------------------------
    def _preempt(self, seq: Sequence, work: Work) -> None:
        """Back to waiting. What was computed is in the tree, and usually found again."""
        slot = seq.slot
        self._leave(seq)
        work.grants = [grant for grant in work.grants if grant.slot != slot]
        work.preempted = True
        seq.status = Status.WAITING
        seq.unsent = []  # what is forced goes with the next join
        seq.planned = seq.computed = 0
        seq.life += 1
        self.counts.preemptions += 1
        insort(self.waiting, seq, key=_ticket)

    def _claim(self, seq: Sequence, group: int) -> int:
        """Pages that must be had for it: to come to the tokens there are, or to all it may have.

        Of a window group, a sure one claims its whole share, shared pages or not: those it gives
        back, and others may hold them on."""
        cache = self.cache
        if not self.sure:
            return max(0, cache.needs(len(seq.tokens), group) - cache.held(seq, group))
        needs, held = cache.needs(seq.limit - 1, group), cache.held(seq, group)
        return max(needs, held) if cache.pools[group].window else max(0, needs - held)

    def _claims(self, group: int) -> int:
        """Of all that run, together."""
        if self.sure or self.cache.pools[group].window:
            return sum(self._claim(seq, group) for seq in self.running)
        size = self.cache.size  # the same in one line: each admission asks for it
        lacks = [-(-len(seq.tokens) // size) - len(seq.pages[group]) for seq in self.running]
        return sum(lack for lack in lacks if lack > 0)

    def _supply(self, pool: PagePool) -> int:
        """What claims are set against."""
        return pool.total if self.sure and pool.window else pool.room

    def _owed(self, work: Work) -> list[int]:
        """By group, the claims of all that run."""
        if work.owed is None:
            work.owed = [self._claims(group) for group in range(len(self.cache.pools))]
        return work.owed

    def _others(self, work: Work, seq: Sequence) -> list[int]:
        """By group, the claims of all that run but one."""
        return [owed - self._claim(seq, group) for group, owed in enumerate(self._owed(work))]

    def _most(self, others: list[int], seq: Sequence) -> list[int]:
        """By group, pages that a sure sequence may take so that the claims of `others` still hold."""
        return [
            pool.total - others[g] - self.cache.held(seq, g) if pool.window else pool.room
            for g, pool in enumerate(self.cache.pools)
        ]

    # ---- admission ----------------------------------------------------------------------
    def _admit(self, work: Work) -> None:
        """Rows for those that wait, while there are slots, budget and room."""
        cache = self.cache
        if self.stuck == cache.gains:
            return
        sources: set[tuple[int, int]] = set()
        for seq in self.policy.waiting(self.waiting, cache):
            if not self.slots or not work.more or seq.promised:
                break  # its flights have not landed: what it will know is not known yet
            copies = cache.admit(seq)
            if copies is None:
                continue  # a sibling is computing its next page
            clash = any((c.group, c.target) in sources for c in copies)
            later = clash or not work.chunk(seq.planned, seq.todo)
            if later or not self._fits(work, seq):
                seq.planned = seq.computed = 0  # its copies are not made: there is nothing to keep
                cache.release(seq)
                if not later:
                    self.stuck = cache.gains
                break
            sources.update((c.group, c.source) for c in copies)
            work.copies += copies
            self._join(work, seq)

    def _fits(self, work: Work, seq: Sequence) -> bool:
        """Whether there is room for it beside those that run; if so, it has pages for its first row."""
        cache, most = self.cache, None
        if self.running:
            owed = self._owed(work)
            # Each time it was preempted it wants twice the room to spare, so that it seldom is again.
            spare = 0 if self.sure else len(self.running) << min(seq.life, 24)
            for group, pool in enumerate(cache.pools):
                more = 0 if pool.window and not seq.life else spare
                if self._supply(pool) < owed[group] + self._claim(seq, group) + more:
                    return False
            most = self._most(owed, seq) if self.sure and cache.windows else None
        want = seq.planned + work.chunk(seq.planned, seq.todo)
        reach = cache.fit(seq, want, most)
        return reach > seq.planned and cache.extend(seq, reach) is not None

    def _join(self, work: Work, seq: Sequence) -> None:
        """It gets a slot and its first row."""
        at = bisect_left(self.waiting, seq.ticket, key=_ticket)
        del self.waiting[at]
        for older in islice(self.waiting, min(at, LOOK)):
            older.waited += 1
        insort(self.running, seq, key=_ticket)
        seq.status, seq.slot = Status.RUNNING, self.slots.pop()
        request, start = seq.request, seq.planned
        if seq.life == 0:
            seq.cached = min(start, request.prompt)
            self.counts.prompt += request.prompt
            self.counts.hit += seq.cached
        tables = [table[:] for table in seq.pages]
        join = Join(seq.slot, seq.tokens.tobytes(), request.prompt, tables, start, request.sampling)
        work.joins.append(join)
        room = len(seq.pages[0]) * self.cache.size - start
        count = min(work.chunk(start, len(seq.tokens) - start), room)
        work.took(start, count)
        seq.planned = start + count
        sample = seq.planned == len(seq.tokens)
        work.rows.append(Row(seq.slot, count, sample))
        work.seqs.append(seq)
        work.left -= count
        if sample:
            seq.promised, seq.guessed = 1, True
        else:
            self.opening.add(seq)
        if work.owed is not None:
            work.owed = [owed + self._claim(seq, group) for group, owed in enumerate(work.owed)]

    # ---- what became of a batch ---------------------------------------------------------
    def commit(self, rows: list[Row], seqs: list[Sequence], lives: list[int], result: Result) -> list[Output]:
        """Take in a step's result: by row, its sequence, and the life it had when it was launched."""
        outputs: list[Output] = []
        computed, finished = 0, Status.FINISHED
        maker, windows, size = self.cache.maker, self.cache.windows, self.cache.size
        logprobs, errors = result.logprobs or repeat(None), result.errors or repeat(None)
        each = zip(rows, seqs, lives, result.tokens, logprobs, errors, strict=False)
        for row, seq, life, tokens, shown, error in each:
            wanted = 1 + row.drafts if row.sample else 0
            missed = wanted - len(tokens)  # guesses that were wrong
            count = row.count - missed
            computed += count
            if seq.status is finished:
                continue
            seq.promised -= wanted
            fresh = seq.life == life
            if fresh:
                seq.computed += count
                if missed:
                    seq.planned -= missed
            if error is not None:
                outputs.append(self._spoilt(seq, error))
                continue
            if wanted:
                outputs.append(output := self._take(seq, tokens, shown))
                if output.finished is not None:
                    continue
            if fresh:
                if seq in maker:
                    self._fix(seq, self.cache.publish(seq))
                if windows and seq.computed % size < count:  # a page was filled
                    self._fix(seq, self.cache.slide(seq))
        self.counts.steps += 1
        self.counts.computed += computed
        return outputs

    def _take(self, seq: Sequence, tokens: list[int], logprobs: list[Logprob] | None) -> Output:
        """Append what was sampled, and what a grammar forces after it."""
        if seq.ahead:
            tokens = tokens + seq.ahead
            seq.ahead = []
        known, request, why = seq.tokens, seq.request, None
        limit, stops = seq.limit, request.sampling.stop_ids
        before = len(known)
        for token in tokens:
            known.append(token)
            if token in stops or len(known) >= limit:
                why = self._why(seq, token)
                tokens = tokens[: len(known) - before]
                break
        self.counts.output += len(tokens)
        if logprobs is not None:
            logprobs = None if request.sampling.logprobs is None else logprobs[: len(tokens)]
        if why is None:
            return Output(request.id, tokens, None, logprobs)
        self._end(seq)
        self.counts.finished += 1
        return self.last(seq, tokens, why, logprobs)

    def _spoilt(self, seq: Sequence, error: str) -> Output:
        """End a sequence whose row gave nothing that can be sampled; its KV is not given to others."""
        seq.computed = min(seq.computed, seq.shared * self.cache.size)
        self._end(seq)
        self.counts.finished += 1
        return replace(self.last(seq, [], "error"), error=error)

    def _why(self, seq: Sequence, token: int) -> str | None:
        """Whether a sequence that ends with `token` is over."""
        if token in seq.request.sampling.stop_ids:
            return "stop"
        return "length" if len(seq.tokens) >= seq.limit else None

    def _fix(self, seq: Sequence, changes: list[Change]) -> None:
        if changes:
            self.fixes += [Grant(seq.slot, *change) for change in changes]

    def _end(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._leave(seq)
        else:
            del self.waiting[bisect_left(self.waiting, seq.ticket, key=_ticket)]
            self.cache.release(seq)
            self.stuck = -1
        seq.status = Status.FINISHED
        del self.live[seq.request.id]

    def _leave(self, seq: Sequence) -> None:
        """Give back pages and slot. Safe although flights still use them: all that touches pages
        runs in order, and a new owner writes at the earliest in a batch after those."""
        del self.running[bisect_left(self.running, seq.ticket, key=_ticket)]
        self.opening.discard(seq)
        self.cache.release(seq)
        if self.fixes:
            self.fixes = [grant for grant in self.fixes if grant.slot != seq.slot]
        self.slots.append(seq.slot)
        seq.slot = -1

    # ---- looking ------------------------------------------------------------------------
    def stats(self, rows: int = 0, tokens: int = 0, seconds: float = 0.0, idle: float = 0.0) -> StepStats:
        """All counts, with what the engine knows of the last step and of the device's idle time."""
        told = StepStats(
            seconds=seconds,
            idle_seconds=idle,
            rows=rows,
            tokens=tokens,
            running=len(self.running),
            waiting=len(self.waiting),
        )
        return self.counts.add(told, self.cache.view(self.running))


def _ticket(seq: Sequence) -> int:
    return seq.ticket
