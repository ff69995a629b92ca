"""Start an engine in this process: from a Config and a local model to something that steps.

The one place where the two islands are put together. It takes its time (weights are read and
repacked) and says how long each part took.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trine.config import Config
from trine.core.messages import Ready
from trine.loader import checkpoint

from . import lean

if TYPE_CHECKING:
    from trine.executor.base import Executor
    from trine.plan import Plan

    from .engine import Engine


def start(config: Config, path: Path, *, imports: threading.Thread | None = None) -> tuple[Engine, Ready]:
    """The engine, and what faces need to know of it. Torch is imported here, and not before, unless
    `imports` does so already: a thread to be waited for."""
    began = time.monotonic()
    seconds: dict[str, float] = {}

    def lap(name: str) -> None:
        seconds[name] = time.monotonic() - began - sum(seconds.values())

    checkpoint.open(path, dummy=config.load_format == "dummy")  # once: the plan and the worker find it read
    lap("checkpoint")
    if imports:
        imports.join()
    from trine.plan import resolve
    from trine.registry import get

    if not _lean(config):
        lean.fetch()
    lap("import")
    plan = resolve(config, path)
    lap("plan")
    executor = make_executor(plan)
    seconds |= executor.call("seconds")[0]

    from trine.cache.manager import Cache
    from trine.scheduler.mix import Mix
    from trine.scheduler.scheduler import Scheduler

    from .engine import Engine

    scheduler = Scheduler(
        Cache(plan.groups, plan.page_size),
        slots=plan.max_num_seqs,
        budget=plan.budget,
        max_len=plan.max_model_len,
        policy=get("scheduler.policies", plan.policy)(),
        capacity=plan.capacity,
        mix=Mix(round(plan.ridge), plan.reach) if plan.ridge else None,
    )
    engine = Engine(scheduler, executor, eos=plan.eos, vocab=plan.vocab, depth=plan.depth)
    checkpoint.forget()
    lap("engine")
    return engine, Ready(
        pid=os.getpid(),
        model=plan.model,
        vocab=plan.vocab,
        eos=plan.eos,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        page_size=plan.page_size,
        pages=min(group.pages for group in plan.groups) - 1,
        plan=[(choice.name, choice.value, choice.why) for choice in plan.choices],
        seconds={name: round(value, 3) for name, value in seconds.items()},
    )


def _lean(config: Config) -> bool:
    """Whether torch can stay without what was put off: a GPU's libraries may want any of it, and so do
    random weights."""
    from trine.plan import Reasons
    from trine.plan.machine import platform

    return config.load_format != "dummy" and not platform(config, Reasons(), real=True).asynchronous


def make_executor(plan: Plan) -> Executor:
    """A device that works by itself is only given orders; a CPU gets a thread."""
    from trine.executor.direct import DirectExecutor
    from trine.executor.local import LocalExecutor
    from trine.registry import get
    from trine.runtime.worker import Worker

    if get("platforms", plan.platform).asynchronous:
        return DirectExecutor(lambda: Worker(plan))
    return LocalExecutor(lambda: Worker(plan))
