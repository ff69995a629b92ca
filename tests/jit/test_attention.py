"""Tree attention in Triton against the plain formula, in float64, under the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.kit.attention import SLOTS, World, want
from trine.core.types import Share
from trine.kernels.attention.base import Limits
from trine.kernels.attention.triton import DEPTH, Tree, Tuning, lay_out
from trine.platforms.cpu import Cpu


def tree(world: World, **more: Any) -> Tree:
    return Tree(world.want, world, Cpu(), 0, Limits(16, SLOTS, 128, 64), **more)


def attend(backend: Tree, world: World, rows: list[tuple[int, int]], q: torch.Tensor, **more: Any) -> Any:
    step = world.step(rows)
    step = step._replace(attention=[backend.plan(step)])
    return backend.run(q, 0, step, **more), step


def check(
    world: World,
    rows: list[tuple[int, int]],
    near: float = 1e-5,
    dtype: Any = torch.float32,
    tuning: Any = None,
    **more: Any,
) -> None:
    backend = tree(world, tuning=tuning)
    backend.share(world.shares)
    q = torch.randn(sum(count for _, count in rows), world.want.heads, world.want.head_dim).to(dtype)
    found, step = attend(backend, world, rows, q, **more)
    wanted = world.expected(q, step, **more)
    assert ((found.double() - wanted).norm() / wanted.norm()).item() < near


@pytest.mark.parametrize("length", [1, 3, 16, 17, 90])
def test_one_row(length: int) -> None:
    world = World(want())
    world.fill(3, length)
    check(world, [(3, 1)])


@pytest.mark.parametrize(
    "heads,kv_heads,dim,page",
    [(2, 2, 16, 1), (3, 1, 24, 16), (4, 1, 64, 4), (8, 1, 16, 5), (14, 2, 16, 4), (17, 1, 16, 4)],
)
def test_shapes(heads: int, kv_heads: int, dim: int, page: int) -> None:
    world = World(want(heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=page))
    world.common([1, 2, 3], 0, 20 // page)
    for slot, length in ((1, 25), (2, 31), (3, 22), (4, 18)):
        world.fill(slot, length)
    check(world, [(1, 1), (4, 1), (3, 1), (2, 1)])


@pytest.mark.parametrize("seed", range(3))
def test_many_rows_of_all_lengths(seed: int) -> None:
    world = World(want(), seed)
    slots = world.draw.sample(range(1, SLOTS), 10)
    for slot in slots:
        world.fill(slot, world.draw.randint(1, 60))
    check(world, [(slot, 1) for slot in slots], tuning=Tuning(block=16, each=3))


SMALL = {"block": 16, "stages": 1, "own": (16, 1, 3), "row": (16, 1), "copied": (16, 1), "tile": 16}
CUT = Tuning(shared_block=16, shared_each=2, join=2, whole=1e9, **SMALL)
WHOLE = Tuning(
    shared_block=16, shared_each=2, join_shared=2, whole=0.0, **SMALL
)  # a program for each row and head


@pytest.mark.parametrize("tuning", [None, CUT, WHOLE])
def test_groups_of_all_sizes_nested_with_members_elsewhere(tuning: Tuning | None) -> None:
    world = World(want(heads=8, kv_heads=2))
    world.common([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0, 5)  # more than one tile of 8 seats
    world.common([1, 2, 3, 4], 5, 6)
    world.common([6, 7], 5, 3)
    world.common([2, 3], 11, 1)
    for slot in range(1, 11):
        world.fill(slot, world.lengths[slot] + slot % 4)
    check(
        world, [(slot, 1) for slot in (4, 2, 9, 3, 7)], tuning=tuning
    )  # others of their runs are not in this step


@pytest.mark.parametrize("tuning", [None, CUT, WHOLE])
def test_a_row_may_have_nothing_of_its_own_or_less_than_was_said(tuning: Tuning | None) -> None:
    world = World(want())
    world.common([1, 2, 3], 0, 5)
    world.fill(2, 27)
    world.lengths[3] = 9  # its slot has another tenant by now
    check(world, [(1, 1), (2, 1), (3, 1)], tuning=tuning)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 1, 20, 400])
@pytest.mark.parametrize("tuning", [CUT, WHOLE])
def test_blocks_that_are_copied_whole_count_only_what_is_seen(
    tuning: Tuning, window: int, softcap: float
) -> None:
    world = World(want(dtype="float16", page_size=32, window=window, softcap=softcap), dtype=torch.float16)
    if not window:
        world.common([1, 2, 5], 0, 2)
    for slot, length in ((1, 65), (2, 96), (3, 1), (4, 33), (5, max(64, world.lengths[5]))):
        world.fill(slot, length)
    check(world, [(slot, 1) for slot in (2, 1, 5, 4, 3)], 1e-3, torch.float16, tuning)


@pytest.mark.parametrize("tuning", [CUT, WHOLE])
def test_rows_that_fill_a_step_up_disturb_nothing(tuning: Tuning) -> None:
    world = World(want())
    world.common([1, 2], 0, 4)
    world.fill(1, 20), world.fill(2, 21)
    backend = tree(world, tuning=tuning)
    backend.share(world.shares)
    world.lengths[0] = 1
    q = torch.randn(5, 4, 16)
    found, step = attend(backend, world, [(1, 1), (2, 1), (0, 1), (0, 1), (0, 1)], q)
    world.pages[0] = 1
    wanted = world.expected(q, step)
    assert torch.allclose(found[:2].double(), wanted[:2], atol=1e-5)


def test_runs_change_and_end() -> None:
    world = World(want())
    world.common([1, 2], 0, 4)
    for slot in (1, 2):
        world.fill(slot, 20)
    backend, q = tree(world), torch.randn(2, 4, 16)
    for shares in ([], world.shares, [Share(0, 2, [1, 2])], [], [Share(2, 2, [1, 2])], [Share(0, 4, [1])]):
        backend.share(shares)
        found, step = attend(backend, world, [(1, 1), (2, 1)], q)
        assert torch.allclose(found.double(), world.expected(q, step), atol=1e-5)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_prompts_beside_single_rows(page: int) -> None:
    world = World(want(page_size=page))
    world.common([1, 2, 3], 0, 16 // page)
    for slot, length in ((1, 18), (2, 43), (3, 17), (4, 21), (5, 2)):
        world.fill(slot, length)
    check(world, [(1, 1), (3, 1), (2, 27), (4, 21), (5, 2)])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_window(window: int, invariant: bool) -> None:
    world = World(want(window=window, invariant=invariant))
    for slot, length in ((1, 50), (2, 3), (3, 64), (4, 58), (5, 2)):
        world.fill(slot, length)
    for slot, count in ((1, 1), (3, 1), (4, 22)):  # pages behind the window are gone
        gone = max(0, world.lengths[slot] - count + 1 - window) // 4
        world.pages[slot, :gone] = 2**20
    check(world, [(1, 1), (2, 1), (3, 1), (4, 22), (5, 2)])


@pytest.mark.parametrize("kind", [{"softcap": 2.0}, {"sinks": True}, {"scale": 0.7}])
@pytest.mark.parametrize("invariant", [False, True])
def test_scores(kind: dict[str, Any], invariant: bool) -> None:
    world = World(want(invariant=invariant, **kind))
    world.common([1, 2], 0, 6)
    for slot, length in ((1, 30), (2, 41), (3, 20), (4, 35)):
        world.fill(slot, length)
    sinks = {"sinks": torch.randn(4) * 2} if "sinks" in kind else {}
    check(world, [(1, 1), (2, 1), (3, 1), (4, 11)], **sinks)


@pytest.mark.parametrize(
    "dtype,kv", [("float16", "float16"), ("float32", "bfloat16"), ("float16", "float8_e4m3fn")]
)
def test_dtypes(dtype: str, kv: str) -> None:
    """The interpreter has no products of bfloat16."""
    world = World(want(dtype=dtype, kv_dtype=kv), dtype=getattr(torch, kv))
    world.common([1, 2], 0, 6)
    for slot, length in ((1, 30), (2, 41), (3, 20), (4, 35)):
        world.fill(slot, length)
    check(world, [(1, 1), (2, 1), (3, 1), (4, 11)], 1e-3, getattr(torch, dtype))


@pytest.mark.parametrize("window", [0, 300])
def test_invariant_results_are_the_same_bits_in_any_step(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In numpy's own product a row's bits depend on its place among the rows.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).sum(1, dtype))
    world = World(want(invariant=True, heads=3, kv_heads=1, window=window))
    world.common([1, 2], 0, 6)
    for slot, length in ((1, 600), (2, 41), (3, 20), (4, 270), (5, 1), (6, 256), (7, 257)):
        world.fill(slot, length)
    q = torch.randn(30, 3, 16)
    backend = tree(world)
    chunk, step = attend(backend, world, [(3, 1), (1, 30)], torch.cat([q[:1], q]))
    assert torch.allclose(chunk.double(), world.expected(torch.cat([q[:1], q]), step), atol=1e-5)
    smaller, _ = attend(backend, world, [(1, 7)], q[-7:])
    alone, _ = attend(backend, world, [(1, 1)], q[-1:])  # cut into its runs, by as many programs
    backend.share(world.shares)
    beside, _ = attend(backend, world, [(3, 1), (1, 1), (2, 1), (4, 9)], torch.cat([q[:1], q[-1:], q[:10]]))
    many = [(slot, 1) for slot in (2, 3, 4, 1, 5, 6, 7)]
    q[3] = q[-1]
    among, step = attend(backend, world, many, q[:7])
    assert torch.allclose(among.double(), world.expected(q[:7], step), atol=1e-5)
    monkeypatch.setattr("trine.kernels.attention.triton.MOST_RUNS", 1)  # no row is cut
    uncut, _ = attend(backend, world, many, q[:7])
    assert torch.equal(alone[0], chunk[-1])
    assert torch.equal(smaller, chunk[-7:])
    assert torch.equal(beside[1], chunk[-1])
    assert torch.equal(among[3], chunk[-1])
    assert torch.equal(uncut, among)


def test_cannot() -> None:
    assert Tree.cannot(want()) is None
    assert "evenly" in str(Tree.cannot(want(heads=3)))
    assert "int8" in str(Tree.cannot(want(kv_dtype="int8")))
    assert "256" in str(Tree.cannot(want(head_dim=512)))


def test_runs_that_cannot_be_are_left_out() -> None:
    """A slot that is named twice sits once; what would be longer than any context is nobody's."""
    slots, tiles, seats = 6, 4, 4
    to = torch.zeros(16 + (2 + DEPTH) * slots + (2 + seats) * tiles, dtype=torch.int32).numpy()
    assert lay_out([Share(0, 2, [2, 3, 2])], to, slots, tiles, seats, 16) == 1
    assert to[16 : 16 + slots].tolist() == [0, 0, 32, 32, 0, 0]
    for wrong in ([2, 2], [2], [0, 9, -1]):
        assert lay_out([Share(0, 2, wrong)], to, slots, tiles, seats, 16) == 0
    for count in (0, -1, 2**29, 2**62):
        assert lay_out([Share(0, count, [2, 3])], to, slots, tiles, seats, 16) == 0
