"""A worker with every Triton kernel there is, under the interpreter, with steps that are recorded and repeated:
whatever the schedule, it says what the reference kernels say."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from tests.cpu.test_worker import VOCAB, Running, make_plan, write_model
from trine.core.types import Group, Request, Sampling
from trine.platforms.cpu import Cpu

KERNELS = {"attention": "triton", "fused": "triton", "table": "triton", "sampling": "triton"}


class Captured:
    """Recorded orders: the first replay does them, later ones fill the same tensor."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.value = call, None

    def replay(self) -> None:
        found = self.call()
        self.value = found if self.value is None else self.value.copy_(found)


class Graph:
    def __init__(self) -> None:
        self.count = 0

    def capture(self, call: Callable[[], Any]) -> Captured:
        self.count += 1
        return Captured(call)


def requests() -> list[Request]:
    """Prompts that share a stem of several pages in groups, some cold, some greedy."""
    rng = random.Random(4)
    stems = [[rng.randrange(VOCAB) for _ in range(size)] for size in (26, 13)]
    made = []
    for i in range(7):
        stem = stems[i % 2] if i < 6 else []
        tokens = stem + [rng.randrange(VOCAB) for _ in range(1 + i)]
        sampling = Sampling(temperature=0.0 if i % 3 else 0.8, seed=i, max_tokens=3 + i % 4, ignore_eos=True)
        made.append(Request(str(i), tokens, sampling))
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one", 1)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Graph:
    graph = Graph()
    monkeypatch.setattr(Cpu, "graph", lambda self: graph)
    return graph


@pytest.mark.parametrize("depth", [1, 2])
def test_kernels_in_triton_say_what_the_reference_says(path: Path, recorder: Graph, depth: int) -> None:
    plain = make_plan(path, dtype="float32", product="reference", groups=[Group(200)], budget=48)
    with Running(plain) as running:
        true = running.run(requests(), arrivals=3)
    changes: dict[str, Any] = KERNELS | {"batch_invariant": False, "graphs": [1, 2, 4, 8], "depth": depth}
    with Running(make_plan(path, dtype="float32", product="reference", budget=48, **changes)) as running:
        said = running.run(requests(), arrivals=3)
    assert said == true
    assert recorder.count, "no step was recorded"
