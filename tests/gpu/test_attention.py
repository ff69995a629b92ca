"""Every attention backend that can run here against the plain formula, at sizes and in shapes of real steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from tests.kit.attention import World
from trine.core.types import Share
from trine.kernels.attention.base import Limits, Want
from trine.registry import find

BACKENDS = ("triton", "flash", "flashinfer")
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64}
CUT, WHOLE = 1e9, 0.0  # rows of one token in equal parts, or a program for each row and head
SLOTS = 50

# Each is compiled anew: what goes together is one case, where no backend loses a wish that it can grant.
SHAPES: list[dict[str, Any]] = [
    {},
    {"heads": 28, "kv_heads": 4, "page_size": 16},
    {"heads": 16, "kv_heads": 1, "head_dim": 64, "page_size": 1},
    {"heads": 8, "kv_heads": 4, "head_dim": 256},
    {"heads": 8, "kv_heads": 8, "head_dim": 80},
    {"dtype": "float16", "window": 300},
    {"softcap": 20.0},
    {"kv_dtype": "float8_e4m3fn", "sinks": True},
    {"dtype": "float32", "heads": 4, "kv_heads": 2, "head_dim": 64},
]


@pytest.fixture(scope="module")
def platform() -> Any:
    return next(kind for name, kind in find("platforms").items() if name != "cpu" and kind.cannot() is None)()


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest, platform: Any) -> None:
    """Kernels are compiled side by side, by running the chosen cases; how those end is seen when their turn comes."""
    cases = []
    for item in request.session.items:
        given = getattr(item, "callspec", None)
        if isinstance(item, pytest.Function) and item.path == request.path and given:
            cases += [(item.obj, given.params)] if given.params.get("name") == "triton" else []
    with ThreadPoolExecutor(8) as pool:
        for some in (cases[:1], cases[1:]):  # the first one alone wakes up what there is one of
            wait([pool.submit(case, platform=platform, **params) for case, params in some])


def make(name: str, platform: Any, slots: int = SLOTS, length: int = 3008, **more: Any) -> World:
    """A world for a backend; skipped, with the backend's own reason, if it cannot."""
    facts = platform.facts()
    given = {"dtype": "bfloat16", "invariant": False, "device": facts.kind, "capability": facts.capability}
    given |= LLAMA | more
    want = Want(**({"kv_dtype": given["dtype"]} | given))
    if reason := find("kernels.attention")[name].cannot(want):
        pytest.skip(f"{name} {reason}")
    return World(want, 0, length, getattr(torch, want.kv_dtype), slots, "cuda")


def made(name: str, world: World, platform: Any, whole: float) -> Any:
    """The backend. Libraries are asked for short rows too."""
    limits = Limits(len(world.lengths), len(world.lengths), 2**15, 2**14)
    with platform.device():
        backend = find("kernels.attention")[name](world.want, world, platform, 0, limits)
    backend.short = 0
    tree = getattr(backend, "tree", backend)
    tree.tuning = tree.tuning._replace(whole=whole)
    backend.share(world.shares)
    return backend


def check(name: str, world: World, platform: Any, rows: list[tuple[int, int]], whole: float = CUT) -> None:
    backend, step, want = made(name, world, platform, whole), world.step(rows), world.want
    q = torch.randn(step.bound.tokens, want.heads, want.head_dim, device="cuda").to(
        getattr(torch, want.dtype)
    )
    sinks = {"sinks": torch.randn(want.heads, device="cuda") * 2} if want.sinks else {}
    expected = world.expected(q, step, **sinks)
    for _ in range(2):  # what a launch leaves behind must not harm the next
        near(backend.run(q, 0, step._replace(attention=[backend.plan(step)]), **sinks), expected)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Each token, by the length of its result; besides 2e-3, what rounding the exact result costs."""
    off, least = ((x.double() - expected).norm(dim=1) for x in (found, expected.to(found.dtype)))
    most = 2e-3 + least / expected.norm(dim=1)
    off = (off / expected.norm(dim=1)).nan_to_num(float("inf"))
    wrong = (off >= most).nonzero().flatten().tolist()
    assert not wrong, f"tokens {wrong[:20]} of {len(off)} are off by up to {off.max().item():.1e}"


@pytest.mark.parametrize("name", BACKENDS)
def test_one_row(name: str, platform: Any) -> None:
    world = make(name, platform)
    world.fill(1, 2113)
    check(name, world, platform, [(1, 1)])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_thousand_rows_of_which_pairs_share(name: str, platform: Any) -> None:
    world = make(name, platform, slots=1001, length=512)
    for slot in range(1, 1001, 2):
        world.common([slot, slot + 1], 0, 2)
    for slot in range(1, 1001):
        world.fill(slot, 128 + world.draw.randint(0, 300))
    check(name, world, platform, [(slot, 1) for slot in range(1, 1001)], WHOLE)


def grouped(world: World) -> list[tuple[int, int]]:
    """Groups of 31, 7, 3 and 2, one nested in another, members of nothing, empty private parts, any length. Two begin
    alike until the middle of a page, which each has for itself."""
    size = world.want.page_size
    world.common(list(range(1, 32)), 0, 1024 // size)
    world.common(list(range(1, 11)), 1024 // size, 256 // size)
    world.common([3, 4], 1280 // size, 64 // size)
    world.common(list(range(32, 39)), 0, 128 // size)
    world.common([39, 40, 41], 0, 64 // size)
    world.common([42, 43], 0, 64 // size)
    world.common([44, 45, 46, 47], 0, 128 // size)
    world.fill(42, 100)
    world.fill(43, 100)
    alike = torch.arange(64, 100)
    places = (alike % size).to(world.device)
    one, other = (world.pages[slot, alike // size].to(world.device) for slot in (42, 43))
    for kv in (world.k, world.v):
        kv[other, places] = kv[one, places]
    for slot in range(1, 44):
        world.fill(slot, world.lengths[slot] + world.draw.choice([0, 1, 7, 63, 64, 65, 190]))
    for slot, length in ((44, 129), (45, 200), (46, 198), (47, 461), (48, 3000), (49, 2)):
        world.fill(slot, length)
    slots = [slot for slot in range(1, 50) if slot not in (5, 33)]  # two members are not in this step
    world.draw.shuffle(slots)
    return [(slot, 1) for slot in slots]


@pytest.mark.parametrize("more", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_groups_of_all_sizes(name: str, more: dict[str, Any], platform: Any) -> None:
    world = make(name, platform, **more)
    rows = grouped(world)
    check(name, world, platform, rows, CUT)
    check(name, world, platform, rows, WHOLE)
    check(name, world, platform, rows[:19], CUT)


@pytest.mark.parametrize("more", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_prompts_beside_rows_that_share(name: str, more: dict[str, Any], platform: Any) -> None:
    """Chunks behind a beginning that they share, one that begins within it, and a long one over 3,000."""
    world = make(name, platform, **more)
    prompts = [(46, 70), (47, 200), (48, 1500), (49, 2), (8, world.draw.randint(200, 250))]
    taken = [slot for slot, _ in prompts]
    rows = [row for row in grouped(world) if row[0] not in taken]
    check(name, world, platform, rows + prompts)


@pytest.mark.parametrize("name", BACKENDS)
def test_short_chunks_over_much(name: str, platform: Any) -> None:
    world = make(name, platform)
    grouped(world)
    check(name, world, platform, [(1, 1), (9, 1), (48, 40), (8, 7), (7, 2)])
    check(name, world, platform, [(48, 40)])


def test_a_recorded_step_serves_other_rows_and_runs(platform: Any) -> None:
    world = make("triton", platform)
    rows = grouped(world)
    q = torch.randn(len(rows), 32, 128, device="cuda", dtype=torch.bfloat16)
    for whole in (CUT, WHOLE):
        backend, step = made("triton", world, platform, whole), world.step(rows)

        def run(backend: Any = backend, step: Any = step) -> torch.Tensor:
            return backend.run(q, 0, step._replace(attention=[backend.plan(step)]))

        graph, recorded = platform.graph(), {}
        for shares in (world.shares, []):
            backend.share(shares)
            run()
            recorded[backend.shares_now] = graph.capture(run)
        fewer = [Share(0, 3, list(range(1, 20))), *world.shares[3:]]
        for shares in ([], world.shares, world.shares[1:], fewer):
            world.draw.shuffle(rows)
            for slot in range(1, 48):
                world.fill(slot, world.lengths[slot] + world.draw.randint(0, 70))
            other = world.step(rows)
            for mine, new in ((step.slots, other.slots), (step.lengths, other.lengths)):
                mine.copy_(new)
            step.pages[0].copy_(other.pages[0])
            step.slots[-2:], step.lengths[-2:] = 0, 1  # nobody: they fill the step up
            backend.share(shares)
            captured = recorded[backend.shares_now]
            captured.replay()
            near(captured.value[:-2], world.expected(q, other)[:-2])
