"""One worker: builds everything from a Plan, then does what batches say.

It decides nothing and remembers no request: what it needs of a tenant is in the table. Its
methods are called in order, all on one thread.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import trine.registry as registry
from trine.core.types import Batch, Result
from trine.errors import Unsupported
from trine.kernels.attention.base import Attention, Want
from trine.layers.make import Maker
from trine.loader import checkpoint, weights
from trine.models.decoder import Decoder
from trine.parallel.mesh import Mesh
from trine.plan import Plan

from .runner import Runner
from .sampler import Sampler
from .store import KV, Store
from .table import Table


class Waiting(NamedTuple):
    """A step that was computed and not sampled."""

    logits: Tensor  # [rows that sample, vocab] float32
    seconds: float


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
        family, source = registry.family(plan.family), checkpoint.open(Path(plan.path))
        config = family.Config.from_dict(source.config)
        kv: list[KV] = config.kv()
        kept = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32
        self.store = Store(kv, plan.layer_groups, plan.groups, plan.page_size, kept, self.device)
        clock.lap("kv")
        attention = self._attention(config, kv)
        self.model: Decoder = family.Model(config, self._maker(attention))
        clock.lap("model")
        if plan.load_format == "dummy":
            weights.dummy(self.model, plan.seed)
        else:
            weights.fill(self.model, source)
        clock.lap("load")
        slots = plan.max_num_seqs + 1
        self.table = Table(slots, plan.max_model_len, plan.page_size, len(plan.groups), self.device)
        self.runner = Runner(self.table, attention, self.model)
        self.sampler = Sampler(self.table, registry.get("kernels.sampling", "reference")())
        self.waiting: dict[int, Waiting] = {}
        self.results: dict[int, Result] = {}
        clock.lap("table")
        self.seconds = clock.seconds

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        """Apply the orders, and compute the logits of the rows that sample."""
        if any(row.drafts for row in batch.rows):
            raise Unsupported("a row has drafts to verify, and this worker has no drafter")
        began = time.perf_counter()
        self.store.copy(batch.copies)
        self.table.apply(batch)
        logits = self.runner.run(batch.rows)
        self.waiting[batch.step] = Waiting(logits, time.perf_counter() - began)

    @torch.inference_mode()
    def sample(self, batch: Batch, masks: list[list[int] | None] | None) -> None:
        """Choose the tokens of a batch that was computed; `masks` are by row."""
        began = time.perf_counter()
        logits, seconds = self.waiting.pop(batch.step)
        result = self.sampler.sample(batch.step, batch.rows, logits, masks)
        result.seconds = seconds + time.perf_counter() - began
        self.results[batch.step] = result

    def result(self, step: int) -> Result:
        """Take the result of a step that was sampled."""
        return self.results.pop(step)

    def call(self, name: str, **values: Any) -> Any:
        """Something rare: "seconds" of the start, by phase; "memory": bytes of KV, and free on the device."""
        match name:
            case "seconds":
                return dict(self.seconds)
            case "memory":
                return {"kv": self.store.bytes, "free": self.platform.memory()[0]}
            case _:
                raise Unsupported(f"a worker knows no {name!r}; it knows: memory, seconds")

    def _attention(self, config: Any, kv: list[KV]) -> list[Attention]:
        """The backend of each KV group."""
        plan, found = self.plan, []
        for index, group in enumerate(plan.groups):
            kept = kv[plan.layer_groups.index(index)]
            want = Want(
                heads=config.num_attention_heads,
                kv_heads=kept.kv_heads,
                head_dim=kept.head_dim,
                page_size=plan.page_size,
                kv_dtype=str(self.store.groups[index].dtype).removeprefix("torch."),
                window=group.window,
                invariant=plan.batch_invariant,
                device=self.device.type,
            )
            backend = registry.get("kernels.attention", plan.attention)
            found.append(backend(want, self.store, self.platform, index))
        return found

    def _maker(self, attention: list[Attention]) -> Maker:
        plan = self.plan
        by_layer = [attention[group] for group in plan.layer_groups]
        return Maker(
            plan.dtype,
            plan.product,
            self.mesh,
            by_layer,
            max_len=plan.max_model_len,
            invariant=plan.batch_invariant,
        )


class Clock:
    """Seconds by phase: each lap is what passed since the last one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self.last, 3)
        self.last = now
