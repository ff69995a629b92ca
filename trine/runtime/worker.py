"""One worker: builds everything from a Plan, then does what batches say.

It decides nothing and remembers no request: what it needs of a tenant is in the table. Its methods are called
in order, all on one thread, but for `wait`, which any thread may call. On a platform that is asynchronous
nothing but `wait` and `result` waits for the device.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

import trine.registry as registry
from trine.core.types import Batch, Result, Row
from trine.errors import Unsupported
from trine.kernels.attention.base import Attention, Limits, Want
from trine.kernels.fused import base as fused
from trine.layers.make import Maker
from trine.loader import checkpoint, weights
from trine.models.decoder import Decoder
from trine.parallel.mesh import Mesh
from trine.plan import Plan

from .recorded import record
from .runner import Runner
from .sampler import Pending, Sampler
from .store import KV, Store
from .table import Table


class Flight(NamedTuple):
    """A step that was computed and not sampled."""

    rows: list[Row]  # those of one token first
    order: list[int]  # of them, their places in the batch
    logits: Tensor  # [rows that sample, vocab] float32
    start: Any  # platforms.base.Event


class Landing(NamedTuple):
    """A step whose tokens are on their way."""

    order: list[int]
    pending: Pending
    start: Any
    end: Any


class Worker:
    """Computes. `seconds` says what its start took, by phase."""

    @torch.inference_mode()
    def __init__(self, plan: Plan) -> None:
        clock = Clock()
        self.plan = plan
        self.platform = registry.get("platforms", plan.platform)()
        self.platform.threads(plan.threads)
        self.device = self.platform.device()
        self.mesh = Mesh()
        family, random = registry.family(plan.family), plan.load_format == "dummy"
        source = checkpoint.open(Path(plan.path), dummy=random)
        config = family.Config.from_dict(source.config)
        kv: list[KV] = config.kv()
        with self.device:  # whatever is made inside is made there
            self.store = Store(
                kv, plan.layer_groups, plan.groups, plan.page_size, getattr(torch, plan.kv_dtype), self.device
            )
            clock.lap("kv")
            self.attention = self._attention(config, kv)
            maker = self._maker()
            self.model: Decoder = family.Model(config, maker)
            clock.lap("model")
            if random:
                weights.dummy(self.model, plan.seed)
            else:
                weights.fill(self.model, source)
        run: Any = self.model
        lean = 0
        if plan.product == "native":
            lean = plan.max_num_seqs
            run = record(self.model, self.attention, plan.threads, plan.max_num_seqs)
        self.platform.synchronize()
        clock.lap("load")
        self.table = self._table()
        graph = self.platform.graph() if plan.graphs else None
        settle = getattr(maker.product, "settle", None)  # optional, of a product
        self.runner = Runner(self.table, self.attention, run, graph, plan.graphs, settle, lean)
        self.sampler = Sampler(
            self.table, registry.get("kernels.sampling", plan.sampling)(self._want()), self.platform
        )
        self.slots: list[int] = []  # of the last step's rows
        self.order: list[int] = []  # of the last step
        self.flying: dict[int, Flight] = {}
        self.landing: dict[int, Landing] = {}
        self.last: Any = None  # event at the end of the step before
        clock.lap("table")
        self.seconds = clock.seconds

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        """Apply the orders, and compute the logits of the rows that sample."""
        if any(row.drafts for row in batch.rows):
            raise Unsupported("a row has drafts to verify, and this worker has no drafter")
        start = self.platform.event()
        start.record()
        if batch.copies:
            self.store.copy(batch.copies)
        if batch.joins:
            self.slots = []
        self.table.apply(batch)
        if batch.shares is not None:
            for backend in self.attention:
                backend.share(batch.shares)
        order = self._order(batch.rows)
        rows = [batch.rows[i] for i in order]
        self.flying[batch.step] = Flight(rows, order, self.runner.run(rows), start)

    @torch.inference_mode()
    def sample(self, batch: Batch, masks: list[list[int] | None] | None) -> None:
        """Choose the tokens of a batch that was computed; `masks` are by row."""
        rows, order, logits, start = self.flying.pop(batch.step)
        mine = None if masks is None else [masks[i] for i in order]
        pending = self.sampler.sample(batch.step, rows, logits, mine)
        end = self.platform.event()
        end.record()
        self.landing[batch.step] = Landing(order, pending, start, end)

    def done(self, step: int) -> bool:
        """Whether `result` would not wait."""
        return self.landing[step].end.done()

    def wait(self, step: int) -> None:
        """Until `result` would not wait. From any thread."""
        if landing := self.landing.get(step):
            landing.end.wait()

    def result(self, step: int) -> Result:
        """Take the result of a step that was sampled."""
        order, pending, start, end = self.landing[step]
        end.wait()
        result = pending.result()
        del self.landing[step]
        idle = max(0.0, start.since(self.last)) if self.last is not None else 0.0
        self.last = end
        return replace(_ordered(result, order), seconds=end.since(start), idle=idle)

    @torch.inference_mode()
    def call(self, name: str, **values: Any) -> Any:
        """Something rare: "seconds" of the start, by phase; "memory": bytes of KV, and free on the device; "warm":
        record all graphs there may be, gives how many; "kernels": launches of a step of one row, and of one layer."""
        match name:
            case "seconds":
                return dict(self.seconds)
            case "memory":
                return {"kv": self.store.bytes, "free": self.platform.memory()[0]}
            case "warm":
                return self.runner.warm()
            case "kernels" if self.platform.asynchronous:
                step = self.platform.launches(lambda: self.runner.nobody(1))
                return {"step": step, "layer": round(step / len(self.plan.layer_groups), 1)}
            case _:
                raise Unsupported(
                    f"a worker knows no {name!r} here; it knows: kernels, memory, seconds, warm"
                )

    def _order(self, rows: list[Row]) -> list[int]:
        """Rows of one token first, of them the longest first: the short ones then fill the gaps at the end.

        While the same rows go on with a token each, all grow alike, and the order stays."""
        slots = [row.slot if row.count == 1 else -row.slot for row in rows]
        if slots != self.slots:
            reach = self.table.reach
            self.slots = slots
            self.order = sorted(range(len(rows)), key=lambda i: (slots[i] < 0, -reach[rows[i].slot]))
        return self.order

    def _want(self) -> fused.Want:
        """What table and sampling ask for too."""
        facts = self.platform.facts()
        return fused.Want(self.plan.activations, facts.kind, facts.capability)

    def _table(self) -> Table:
        plan = self.plan
        return Table(
            plan.max_num_seqs + 1,
            plan.max_model_len,
            plan.page_size,
            len(plan.groups),
            self.device,
            registry.get("kernels.table", plan.table)(self._want()),
            self.platform,
        )

    def _attention(self, config: Any, kv: list[KV]) -> list[Attention]:
        """The backend of each KV group."""
        plan, found = self.plan, []
        limits = Limits(plan.max_num_seqs, plan.max_num_seqs + 1, plan.max_model_len, plan.budget)
        for index, group in enumerate(plan.groups):
            kept = kv[plan.layer_groups.index(index)]
            want = Want(
                heads=config.num_attention_heads,
                kv_heads=kept.kv_heads,
                head_dim=kept.head_dim,
                page_size=plan.page_size,
                dtype=plan.activations,
                kv_dtype=str(self.store.groups[index].dtype).removeprefix("torch."),
                window=group.window,
                invariant=plan.batch_invariant,
                device=self.platform.name,
            )
            backend = registry.get("kernels.attention", plan.attention)
            found.append(backend(want, self.store, self.platform, index, limits))
        return found

    def _maker(self) -> Maker:
        plan = self.plan
        return Maker(
            plan.dtype,
            plan.product,
            self.mesh,
            [self.attention[group] for group in plan.layer_groups],
            max_len=plan.max_model_len,
            invariant=plan.batch_invariant,
            fused=plan.fused,
            activations=plan.activations,
            facts=self.platform.facts(),
        )


def _ordered(result: Result, order: list[int]) -> Result:
    """By row of the batch, from by row as it was computed."""
    if order == list(range(len(order))):
        return result
    places = sorted(range(len(order)), key=order.__getitem__)
    lists = {name: getattr(result, name) for name in ("tokens", "logprobs", "errors")}
    return replace(result, **{k: v and [v[i] for i in places] for k, v in lists.items()})


class Clock:
    """Seconds by phase: each lap is what passed since the last one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self.last, 3)
        self.last = now
