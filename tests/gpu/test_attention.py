"""Every attention backend that can run here against the plain formula, at sizes and in shapes of real steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kit.attention import World
from trine.core.types import Share
from trine.kernels.attention.base import Limits, Want
from trine.registry import find

BACKENDS = ("triton", "flash", "flashinfer")
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64}


@pytest.fixture(scope="module")
def platform() -> Any:
    return next(kind for name, kind in find("platforms").items() if name != "cpu" and kind.cannot() is None)()


def wish(platform: Any, **more: Any) -> Want:
    facts = platform.facts()
    given = {"dtype": "bfloat16", "invariant": False, "device": facts.kind, "capability": facts.capability}
    given |= LLAMA | more
    return Want(**({"kv_dtype": given["dtype"]} | given))


def made(name: str, world: World, platform: Any) -> Any:
    """The backend; skipped, with its own reason, if it cannot. Libraries are asked for short rows too."""
    kind = find("kernels.attention")[name]
    if reason := kind.cannot(world.want):
        pytest.skip(f"{name} {reason}")
    limits = Limits(len(world.lengths), len(world.lengths), 2**15, 2**14)
    with platform.device():
        backend = kind(world.want, world, platform, 0, limits)
    backend.short = 0
    backend.share(world.shares)
    return backend


def make(platform: Any, slots: int = 48, length: int = 2200, **more: Any) -> World:
    want = wish(platform, **more)
    return World(want, 0, length, getattr(torch, want.kv_dtype), slots, "cuda")


def check(name: str, world: World, platform: Any, rows: list[tuple[int, int]], **more: Any) -> None:
    backend, step, dtype = made(name, world, platform), world.step(rows), getattr(torch, world.want.dtype)
    q = torch.randn(step.bound.tokens, world.want.heads, world.want.head_dim, device="cuda").to(dtype)
    expected = world.expected(q, step, **more)
    least = off(expected.to(dtype), expected)  # rounding of the result
    for _ in range(2):  # what a launch leaves behind must not harm the next
        found = backend.run(q, 0, step._replace(attention=[backend.plan(step)]), **more)
        assert off(found, expected) < 2e-3 + least


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = ((found.double() - expected).norm() / expected.norm()).item()
    return error if error == error else float("inf")


@pytest.mark.parametrize("name", BACKENDS)
def test_one_row(name: str, platform: Any) -> None:
    world = make(platform, slots=3)
    world.fill(1, 2113)
    check(name, world, platform, [(1, 1)])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_thousand_rows_of_which_pairs_share(name: str, platform: Any) -> None:
    world = make(platform, slots=1001, length=512)
    for slot in range(1, 1001, 2):
        world.common([slot, slot + 1], 0, 2)
    for slot in range(1, 1001):
        world.fill(slot, 128 + world.draw.randint(0, 300))
    check(name, world, platform, [(slot, 1) for slot in range(1, 1001)])


def grouped(world: World) -> list[tuple[int, int]]:
    """Groups of 31, 7, 3 and 2, one nested in another, members of nothing, empty private parts, any length."""
    size = world.want.page_size
    world.common(list(range(1, 32)), 0, 1024 // size)
    world.common(list(range(1, 11)), 1024 // size, 256 // size)
    world.common([3, 4], 1280 // size, 64 // size)
    world.common(list(range(32, 39)), 0, 128 // size)
    world.common([39, 40, 41], 0, 64 // size)
    for slot in range(1, 46):
        world.fill(slot, world.lengths[slot] + world.draw.choice([0, 1, 7, 63, 64, 65, 190]) + (slot > 41))
    slots = [slot for slot in range(1, 46) if slot not in (5, 33)]  # two members are not in this step
    world.draw.shuffle(slots)
    return [(slot, 1) for slot in slots]


@pytest.mark.parametrize("few", [0, 25], ids=["many", "few"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", BACKENDS)
def test_groups_of_all_sizes(name: str, page_size: int, few: int, platform: Any) -> None:
    world = make(platform, page_size=page_size)
    rows = grouped(world)
    check(name, world, platform, rows[few:])


SHAPES: list[dict[str, Any]] = [
    {"heads": 28, "kv_heads": 4},
    {"heads": 16, "kv_heads": 1, "head_dim": 64},
    {"heads": 8, "kv_heads": 4, "head_dim": 256},
    {"heads": 8, "kv_heads": 8, "head_dim": 80},
    {"dtype": "float16"},
    {"kv_dtype": "float8_e4m3fn"},
    {"softcap": 20.0},
    {"window": 300},
    {"sinks": True},
    {"dtype": "float32", "heads": 4, "kv_heads": 2, "head_dim": 64},
]


@pytest.mark.parametrize("more", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_prompts_beside_rows_that_share(name: str, more: dict[str, Any], platform: Any) -> None:
    world = make(platform, **more)
    rows = grouped(world)
    world.fill(46, 1999)
    world.fill(47, 2)
    prompts = [(8, 190 + world.lengths[8] % 60), (7, 2), (46, 1500), (47, 2)]  # two see the same beginning
    rows = [row for row in rows if row[0] not in (7, 8)] + prompts
    sinks = {"sinks": torch.randn(world.want.heads, device="cuda") * 2} if more.get("sinks") else {}
    check(name, world, platform, rows, **sinks)
    check(name, world, platform, rows[:40], **sinks)


def test_a_recorded_step_serves_other_rows_and_runs(platform: Any) -> None:
    world = make(platform)
    rows = grouped(world)
    backend, step = made("triton", world, platform), world.step(rows)
    q = torch.randn(len(rows), 32, 128, device="cuda", dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return backend.run(q, 0, step._replace(attention=[backend.plan(step)]))

    graph, recorded = platform.graph(), {}
    for shares in (world.shares, []):
        backend.share(shares)
        run()
        recorded[backend.shares_now] = graph.capture(run)
    for shares in ([], world.shares, world.shares[1:], [Share(0, 3, list(range(1, 20))), *world.shares[3:]]):
        world.draw.shuffle(rows)
        other = world.step(rows)
        step.slots.copy_(other.slots)
        step.lengths.copy_(other.lengths)
        step.slots[-2:], step.lengths[-2:] = 0, 1  # nobody: they fill the step up
        backend.share(shares)
        captured = recorded[backend.shares_now]
        captured.replay()
        expected = world.expected(q, other)[:-2]
        assert off(captured.value[:-2], expected) < 4e-3
