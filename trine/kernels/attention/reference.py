"""Attention in plain torch, for any platform; on a CPU it is what runs.

Everything is done in tiles of one shape, so that no bit of a token's result depends on what shares the
step, on how its prompt was cut, or on what was cached. Keys are taken in runs of 128 positions, from
multiples of 128 on. Queries are taken in tiles of a few positions, from multiples of that number on, all
query heads of one KV head together; places of a tile that are not computed in this step are filled with
anything. What a query needs depends on its own position alone: the runs up to its own, with a window from
the first that any query of its run may see. One softmax goes over them all; the products with the
values are added run by run.

Two kinds of work follow from that. Rows whose queries fit in one tile (one token at a time, mostly) are
batched with all others that see as many runs. Longer rows go one by one, all tiles of a run at once.

Positions that a row cannot see are read from its own last position instead: what lies in foreign or
unwritten memory, be it NaN, never enters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.core.types import Share

from .base import Limits, Step, Store, Want

RUN = 128  # positions of keys in one product: longer ones waste more behind short rows, shorter ones are more calls
ROWS = 4  # rows of a query tile, at least: fewer are no faster, more are wasted on rows of one token
BUDGET = 2**19  # elements of keys, or of scores, at a time: 2 MiB stay in the cache


class Batch(NamedTuple):
    """Short rows that see as many runs, for one pass."""

    queries: Tensor  # [rows * kv_heads * tile * share]     which head of which token
    keys: list[Tensor]  # by run: [rows * kv_heads * RUN]   which head of which position
    bias: list[Tensor]  # by run: [rows * kv_heads, tile * share, RUN]
    results: Tensor  # [tokens * heads]                     where in the tiles each token's heads are
    tokens: Tensor  # [tokens]


class Span(NamedTuple):
    """Neighbouring tiles of a long row, all in one run."""

    run: int
    start: int  # first tile, counted from the row's first
    stop: int
    place: int  # of the first tile in its run


class Long(NamedTuple):
    """A row of several tiles."""

    start: int  # its first token
    count: int
    skip: int  # places of its first tile before its first token
    queries: Tensor  # [kv_heads, tiles * tile * share]   which head of which token
    first: int  # run that `keys` begins with
    keys: Tensor  # [kv_heads, runs * RUN]                which head of which position
    spans: list[Span]


class Plan(NamedTuple):
    batches: list[Batch]
    longs: list[Long]
    whole: bool  # one batch is the step, in its order


class Reference:
    """Tiles of one shape."""

    name = "reference"
    order = 100
    may_share = shares_now = False

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.softcap or want.sinks:
            return "knows neither softcap nor sinks"
        if want.heads % want.kv_heads:
            return f"{want.heads} heads cannot share {want.kv_heads} KV heads evenly"
        if want.device != "cpu":
            return f"is for a CPU, not {want.device}"
        if want.dtype != "float32" or want.kv_dtype not in ("float32", "bfloat16"):
            return f"is for float32 (KV also bfloat16), not {want.dtype} (KV {want.kv_dtype})"
        return None

    def __init__(
        self, want: Want, store: Store, platform: Any = None, group: int = 0, limits: Limits | None = None
    ) -> None:
        self.want, self.store, self.group = want, store, group
        self.ratio = want.heads // want.kv_heads  # query heads of one KV head
        self.tile = 1  # positions
        while self.tile * self.ratio < ROWS:
            self.tile *= 2
        self.tiles = RUN // self.tile  # of a run
        self.scale = want.head_dim**-0.5 if want.scale is None else want.scale
        self.places: dict[int, list[Tensor]] = {}  # by layer, k and v: [positions * kv_heads, head_dim]
        self.lines = torch.arange(want.kv_heads)
        self.nothing = torch.zeros(1, 1, 1)
        far = -(-want.window // RUN) if want.window else 0
        masks = {d: self._mask(d) for d in range(far + 1)}
        self.masks = {d: mask for d, mask in masks.items() if mask.any()}

    def share(self, shares: list[Share]) -> None:
        """Nothing: every row reads all of its own."""

    def run(self, q: Tensor, layer: int, step: Step) -> Tensor:
        plan: Plan = step.attention[self.group]
        if layer not in self.places:
            self.places[layer] = [x.flatten(0, 2) for x in self.store.layer(layer)]
        keys, values = self.places[layer]
        queries = q.reshape(-1, q.shape[-1])
        width = self.want.heads * self.want.head_dim
        if plan.whole:
            return self._short(plan.batches[0], queries, keys, values).view(-1, width)
        result = q.new_empty(len(q), width)
        for batch in plan.batches:
            result.index_copy_(0, batch.tokens, self._short(batch, queries, keys, values).view(-1, width))
        for long in plan.longs:
            self._long(long, queries, keys, values, result)
        return result

    def _short(self, batch: Batch, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[tokens * heads, head_dim] of a batch. `keys` and `values` are [positions * kv_heads, head_dim]."""
        dim = keys.shape[-1]
        q = queries.index_select(0, batch.queries).view(-1, self.tile * self.ratio, dim)
        pairs = zip(batch.bias, batch.keys, strict=True)
        scores = [self._scores(bias, q, self._take(keys, lines, RUN)) for bias, lines in pairs]
        weights = self._weights(scores)
        result = torch.bmm(weights[0], self._take(values, batch.keys[0], RUN))
        for weight, lines in zip(weights[1:], batch.keys[1:], strict=True):
            result = torch.baddbmm(result, weight, self._take(values, lines, RUN))
        return result.view(-1, dim).index_select(0, batch.results)

    def _long(self, long: Long, queries: Tensor, keys: Tensor, values: Tensor, result: Tensor) -> None:
        """Fills the row's part of `result`."""
        dim, heads = keys.shape[-1], len(long.queries)
        found = queries.new_empty(
            heads, long.queries.shape[1] // (self.tile * self.ratio), self.tile * self.ratio, dim
        )
        for head in range(heads):
            q = queries.index_select(0, long.queries[head]).view(-1, self.tile * self.ratio, dim)
            k = self._take(keys, long.keys[head], RUN)
            v = self._take(values, long.keys[head], RUN)
            for span in long.spans:
                self._span(
                    span, q[span.start : span.stop], k, v, long.first, found[head, span.start : span.stop]
                )
        found = found.view(heads, -1, self.ratio, dim)[:, long.skip : long.skip + long.count]
        mine = result[long.start : long.start + long.count]
        mine.view(long.count, heads, self.ratio, dim).copy_(found.transpose(0, 1))

    def _span(self, span: Span, q: Tensor, k: Tensor, v: Tensor, first: int, result: Tensor) -> None:
        """q [tiles, tile * share, dim]; k, v [runs, RUN, dim] from run `first` on; fills `result`, like q."""
        runs = range(self._first(span.run), span.run + 1)
        tiles = slice(span.place, span.place + len(q))
        scores = [
            self._scores(
                self.masks[span.run - run][tiles] if span.run - run in self.masks else self._zeros(len(q)),
                q,
                k[run - first].expand(len(q), -1, -1),
            )
            for run in runs
        ]
        weights = self._weights(scores)
        found = torch.bmm(weights[0], v[runs.start - first].expand(len(q), -1, -1))
        for weight, run in zip(weights[1:], runs[1:], strict=True):
            found = torch.baddbmm(found, weight, v[run - first].expand(len(q), -1, -1))
        result.copy_(found)

    def _take(self, lines: Tensor, index: Tensor, count: int) -> Tensor:
        return lines.index_select(0, index).view(-1, count, lines.shape[-1]).float()

    def _scores(self, bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.baddbmm(bias, q, k.transpose(1, 2), alpha=self.scale)

    def _weights(self, scores: list[Tensor]) -> tuple[Tensor, ...]:
        """By run. One softmax over all runs of a query."""
        whole = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        return whole.softmax(-1).split(RUN, -1)

    def _mask(self, distance: int) -> Tensor:
        """[tiles of a run, tile * share, RUN]: what to add to the scores of a run's queries with the keys of
        the run that lies so many runs before: 0, or minus infinity for what a query does not see."""
        apart = torch.arange(RUN)[:, None] + distance * RUN - torch.arange(RUN)
        hidden = apart < 0
        if self.want.window:
            hidden |= apart >= self.want.window
        mask = torch.zeros(RUN, RUN).masked_fill_(hidden, float("-inf"))
        mask = mask.view(self.tiles, self.tile, 1, RUN).expand(-1, -1, self.ratio, -1)
        return mask.reshape(self.tiles, -1, RUN)

    def _zeros(self, tiles: int) -> Tensor:
        """The bias where nothing is hidden."""
        return self.nothing.expand(tiles, self.tile * self.ratio, RUN)

    def _first(self, run: int) -> int:
        """The first run that a query of `run` needs: known from its own run, so that no chunk changes it."""
        return max(0, run * RUN - self.want.window + 1) // RUN if self.want.window else 0

    def plan(self, step: Step) -> Plan:
        starts, lengths = step.starts.tolist(), step.lengths.tolist()
        short: dict[int, list[int]] = {}  # by how many runs they see
        longs = []
        for row, length in enumerate(lengths):
            last, first = length - 1, length - (starts[row + 1] - starts[row])
            if first // self.tile == last // self.tile:
                run = last // RUN
                short.setdefault(run - self._first(run) + 1, []).append(row)
            else:
                longs.append(self._plan_long(step, row, starts[row], first, last))
        batches = []
        for runs, rows in short.items():
            width = max(self.want.head_dim, runs * self.tile * self.ratio)
            most = max(1, BUDGET // (RUN * self.want.kv_heads * width))
            batches += [self._plan_batch(step, rows[i : i + most], runs) for i in range(0, len(rows), most)]
        return Plan(batches, longs, whole=len(batches) == 1 and not longs)

    def _plan_batch(self, step: Step, rows: list[int], runs: int) -> Batch:
        index = torch.tensor(rows)
        start = step.starts.index_select(0, index)
        count = step.starts.index_select(0, index + 1) - start
        last = step.lengths.index_select(0, index) - 1
        first = last - count + 1
        tile, run = last // self.tile, last // RUN
        # Which token fills each place of each row's tile; [rows, tile]
        offset = tile[:, None] * self.tile + torch.arange(self.tile) - first[:, None]
        mine = (offset >= 0) & (offset < count[:, None])
        token = torch.where(mine, start[:, None] + offset, start[:, None])
        # Where each place's heads are, in the queries and in the result; [rows, kv_heads, tile, share]
        queries = token[:, None, :, None] * self.want.heads + self._heads()
        places = torch.arange(queries.numel()).view(queries.shape).permute(0, 2, 1, 3)
        keys = self._lines(step, index, (run - runs + 1) * RUN, runs * RUN, first, last)
        return Batch(
            queries=queries.reshape(-1),
            keys=[lines.reshape(-1) for lines in keys.split(RUN, -1)],
            bias=[self._biased(distance, tile % self.tiles) for distance in reversed(range(runs))],
            results=places[mine].reshape(-1),
            tokens=token[mine],
        )

    def _plan_long(self, step: Step, row: int, start: int, first: int, last: int) -> Long:
        count, tiles = last - first + 1, range(first // self.tile, last // self.tile + 1)
        offset = torch.arange(tiles.start * self.tile, tiles.stop * self.tile) - first
        token = start + offset.clamp_(0, count - 1)
        begin, end = self._first(first // RUN), last // RUN + 1
        bounds = torch.tensor([begin * RUN]), (end - begin) * RUN, torch.tensor([first]), torch.tensor([last])
        spans = []
        for run in range(first // RUN, end):
            most = max(1, BUDGET // (self.tile * self.ratio * RUN * (run - self._first(run) + 1)))
            stop = min(tiles.stop, (run + 1) * self.tiles)
            for t in range(max(tiles.start, run * self.tiles), stop, most):
                spans.append(Span(run, t - tiles.start, min(t + most, stop) - tiles.start, t % self.tiles))
        return Long(
            start=start,
            count=count,
            skip=first - tiles.start * self.tile,
            queries=(token[:, None] * self.want.heads + self._heads()).flatten(1),
            first=begin,
            keys=self._lines(step, torch.tensor([row]), *bounds)[0],
            spans=spans,
        )

    def _heads(self) -> Tensor:
        """[kv_heads, 1, share]: the query heads of each KV head."""
        return torch.arange(self.want.heads).view(-1, 1, self.ratio)

    def _lines(
        self, step: Step, rows: Tensor, begin: Tensor, count: int, first: Tensor, last: Tensor
    ) -> Tensor:
        """[rows, kv_heads, count]: where each row's positions from `begin` on lie in the store, by KV head.

        Its queries sit at first..last; positions that none of them sees are replaced by the last."""
        page_size, slots = self.want.page_size, step.slots.index_select(0, rows)
        position = begin[:, None] + torch.arange(count)
        hidden = position > last[:, None]
        if self.want.window:
            hidden |= position <= first[:, None] - self.want.window
        position = torch.where(hidden, last[:, None], position)
        pages = step.pages[self.group][slots[:, None], position // page_size]
        place = pages * page_size + position % page_size
        return place[:, None] * self.want.kv_heads + self.lines[:, None]

    def _biased(self, distance: int, tiles: Tensor) -> Tensor:
        """What to add to the scores of these tiles, for each KV head."""
        if distance not in self.masks:
            return self._zeros(len(tiles) * self.want.kv_heads)
        bias = self.masks[distance].index_select(0, tiles)
        return bias[:, None].expand(-1, self.want.kv_heads, -1, -1).reshape(-1, *bias.shape[1:])


PLUGIN = Reference
