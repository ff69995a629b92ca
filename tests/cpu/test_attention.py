"""Every attention backend that runs on this machine against a plain float64 formula, and bit against bit
against itself: alone or among others, in one piece or in many."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kit.paged import Kind, Paged
from trine.kernels.attention.base import Want
from trine.kernels.attention.reference import RUN, Reference
from trine.registry import find

PLAIN = Want(heads=4, kv_heads=2, head_dim=16, page_size=4)
BACKENDS = sorted(n for n, kind in find("kernels.attention").items() if kind.cannot(PLAIN) is None)
HEADS = [(4, 4), (6, 2), (8, 1), (9, 3)]  # many heads, groups, one KV head, an odd share
Tokens = dict[int, tuple[Tensor, Tensor, Tensor]]  # by row: q, k, v of all its positions


def tokens(want: Want, lengths: list[int]) -> Tokens:
    torch.manual_seed(sum(lengths))
    sizes = (want.heads, want.kv_heads, want.kv_heads)
    return {
        row: tuple(torch.randn(length, size, want.head_dim) for size in sizes)  # type: ignore[misc]
        for row, length in enumerate(lengths)
    }


def formula(want: Want, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every position of one row, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(want.heads // want.kv_heads, 0) for x in (k, v))
    apart = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    hidden = (apart < 0) | (apart >= (want.window or 10**9))
    scores = (q @ k.transpose(1, 2) * want.head_dim**-0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


class Bench:
    """One layer of one backend, fed row by row."""

    def __init__(self, name: str, want: Want, seed: int = 0) -> None:
        backend = find("kernels.attention")[name]
        if reason := backend.cannot(want):
            pytest.skip(f"{name} cannot: {reason}")
        dtype = getattr(torch, want.kv_dtype)
        kinds = [Kind(want.kv_heads, want.head_dim, want.window)]
        self.rows = Paged(
            kinds, [0], want.page_size, pages=4000 // want.page_size + 20, seed=seed, dtype=dtype
        )
        self.backend = backend(want, self.rows, None)

    def run(self, data: Tokens, counts: list[tuple[int, int]]) -> dict[int, Tensor]:
        """By row: the results of its next tokens."""
        counts = sorted(counts, key=lambda one: one[1] > 1)
        first = {row: self.rows.lengths.get(row, 0) for row, _ in counts}
        step = self.rows.step(counts)
        step = step._replace(attention=[self.backend.plan(step)])
        mine = [[x[first[row] : first[row] + count] for x in data[row]] for row, count in counts]
        q, k, v = (torch.cat(parts) for parts in zip(*mine, strict=True))
        for store, new in zip(self.rows.layer(0), (k, v), strict=True):
            store.flatten(0, 1)[step.write[0]] = new.to(store.dtype)
        result = self.backend.run(q, 0, step)
        return {
            row: result[a:b] for (row, _), (a, b) in zip(counts, pairwise(step.starts.tolist()), strict=True)
        }


def random_steps(bench: Bench, data: Tokens, seed: int) -> dict[int, Tensor]:
    """All rows to their ends, in random company and random pieces."""
    draw, found = random.Random(seed), {row: [] for row in data}
    left = {row: len(data[row][0]) for row in data}
    while left:
        chosen = draw.sample(sorted(left), draw.randint(1, len(left)))
        counts = [(row, min(left[row], draw.choice([1, 1, 2, 3, 5, 40, 300]))) for row in chosen]
        for row, result in bench.run(data, counts).items():
            found[row].append(result)
            left[row] -= len(result)
        left = {row: n for row, n in left.items() if n}
    return {row: torch.cat(parts) for row, parts in found.items()}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [0, 7, 300])
def test_ragged_rows_equal_the_formula(
    name: str, page_size: int, heads: tuple[int, int], window: int
) -> None:
    want = Want(*heads, head_dim=16, page_size=page_size, window=window)
    data = tokens(want, [1, 30, 260, 620])
    found = random_steps(Bench(name, want), data, seed=page_size)
    for row, result in found.items():
        torch.testing.assert_close(result.double(), formula(want, *data[row]), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("threads", "window", "dim"), [(1, 0, 16), (1, 300, 64), (1, 0, 80), (2, 300, 64)])
def test_no_bit_depends_on_company_or_pieces(name: str, threads: int, window: int, dim: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        want = Want(9, 3, head_dim=dim, page_size=16, window=window)
        data = tokens(want, [1, 17, 258, 515])
        whole = Bench(name, want)
        alone = {row: whole.run(data, [(row, len(data[row][0]))])[row] for row in data}
        mixed = random_steps(Bench(name, want, seed=1), data, seed=dim)
        assert all(torch.equal(mixed[row], alone[row]) for row in data)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", BACKENDS)
def test_kv_in_bfloat16(name: str) -> None:
    want = Want(4, 2, head_dim=16, page_size=4, kv_dtype="bfloat16")
    data = tokens(want, [40])
    q, k, v = data[0]
    rounded = formula(want, q, k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(
        random_steps(Bench(name, want), data, 3)[0].double(), rounded, atol=2e-6, rtol=0
    )


def test_the_reference_says_what_it_cannot() -> None:
    plain = {"heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 4}
    assert Reference.cannot(Want(**plain)) is None
    assert "softcap" in str(Reference.cannot(Want(**plain, softcap=30.0)))
    assert "sinks" in str(Reference.cannot(Want(**plain, sinks=True)))
    assert "evenly" in str(Reference.cannot(Want(**plain | {"heads": 5})))
    assert "float16" in str(Reference.cannot(Want(**plain, dtype="float16")))


def test_rows_are_longer_than_runs_and_tiles() -> None:
    """Else the tests above would show nothing."""
    tile = Reference(Want(9, 3, 16, 16), Paged([Kind(3, 16)], [0])).tile
    assert 1 < tile < 40 and RUN < 258
