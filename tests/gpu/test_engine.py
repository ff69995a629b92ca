"""A worker on a GPU: recorded steps are the eager ones, overlap changes nothing, shared runs give what flat ones
give, nothing waits for the device, and all of it says what the CPU says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.test_worker import VOCAB, Running, make_plan, write_model
from trine.core.types import Group, Request, Sampling
from trine.plan import Plan

GPU = {"platform": "cuda", "product": "vendor", "attention": "triton"} | dict.fromkeys(
    ("fused", "table", "sampling"), "triton"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one", 1)


def plan(path: Path, dtype: str = "bfloat16", **changes: Any) -> Plan:
    kept = {"dtype": dtype, "activations": dtype, "kv_dtype": dtype}
    more = {"batch_invariant": False, "page_size": 16, "groups": [Group(300)], "budget": 96, "depth": 2}
    return make_plan(path, **(GPU | kept | more | {"graphs": [1, 2, 4, 8, 16]} | changes))


def requests(temperature: float | None = None) -> list[Request]:
    """Two groups that share stems of several pages, and some that share nothing."""
    rng = random.Random(4)
    stems = [[rng.randrange(VOCAB) for _ in range(size)] for size in (150, 101)]
    made = []
    for i in range(14):
        tokens = (stems[i % 2] if i < 10 else []) + [rng.randrange(VOCAB) for _ in range(1 + 3 * i)]
        heat = temperature if temperature is not None else [0.0, 0.7, 1.0][i % 3]
        sampling = Sampling(temperature=heat, seed=i, max_tokens=20 + i, ignore_eos=True, top_k=20 * (i % 2))
        made.append(Request(str(i), tokens, sampling))
    return made


def said(made: Plan, arrivals: int = 4) -> dict[str, list[int]]:
    with Running(made) as running:
        return {id: tokens for id, (tokens, _) in running.run(requests(), arrivals).items()}


def test_in_float32_it_says_what_the_cpu_says(path: Path) -> None:
    torch.backends.fp32_precision = "ieee"
    cpu = make_plan(path, dtype="float32", product="reference", page_size=16, groups=[Group(300)])
    true, found = said(cpu), said(plan(path, "float32"))
    same = sum(true[id] == found[id] for id in true)
    assert same >= len(true) - 1, f"{same} of {len(true)} alike: more than one near-tie"


def test_recorded_steps_are_the_eager_ones(path: Path) -> None:
    assert said(plan(path)) == said(plan(path, graphs=[]))


def test_overlap_changes_nothing(path: Path) -> None:
    assert said(plan(path, depth=1)) == said(plan(path, depth=2))


def test_shared_runs_give_what_flat_ones_give(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = said(plan(path, "float32"))
    runs: list[int] = []
    with Running(plan(path, "float32")) as running:
        backend = running.executor.worker.attention[0]
        monkeypatch.setattr(backend, "share", lambda shares: runs.append(len(shares)))
        flat = {id: tokens for id, (tokens, _) in running.run(requests(), 4).items()}
    assert any(runs), "nothing was shared"
    same = sum(shared[id] == flat[id] for id in flat)
    assert same >= len(flat) - 1, f"{same} of {len(flat)} alike: more than one near-tie"


def test_a_hundred_steps_wait_for_nothing(path: Path) -> None:
    asked = [
        Request(str(i), [1 + i] * 9, Sampling(max_tokens=130, seed=i, ignore_eos=True)) for i in range(8)
    ]
    with Running(plan(path)) as running:
        for request in asked:
            running.engine.add(request)
        for _ in range(10):
            running.step()
        steps = 0
        while steps < 100:
            torch.cuda.set_sync_debug_mode("error")
            try:
                steps += running.engine.launch()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            running.engine.collect()
        assert len(running.engine.scheduler.running) == 8
