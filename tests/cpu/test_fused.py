"""Norms, rotation and gated activation against plain formulas in float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from trine.kernels.fused.base import HeadNorm, Heads, Places, Want
from trine.kernels.fused.reference import GRAIN
from trine.registry import find

BACKENDS = sorted(n for n, kind in find("kernels.fused").items() if kind.cannot(Want()) is None)


@pytest.fixture(params=BACKENDS)
def fused(request: pytest.FixtureRequest) -> object:
    return find("kernels.fused")[request.param]()


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest):
    """Counts that cut memory at places that are no multiple of anything."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_norm(fused) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 5, 48), torch.randn(5, 48)
    wide = x.double()
    true = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(fused.norm(x, weight, 1e-5).double(), true, atol=1e-5, rtol=0)
    other = torch.randn_like(x)
    normed, total = fused.add_norm(x.clone(), other.clone(), weight, 1e-5)
    assert torch.equal(total, x + other)
    assert torch.equal(normed, fused.norm(x + other, weight, 1e-5))


def table(positions: int, dim: int) -> torch.Tensor:
    """As layers/rope.py makes it, with random angles."""
    angle = torch.randn(positions, dim // 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos, -sin, sin), -1)


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] and rows of a table -> the same, turned as complex numbers, in float64."""
    half = x.shape[-1] // 2
    cos, sin = turns[:, None, :half].double(), turns[:, None, 3 * half :].double()
    plane = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.complex(cos, sin)
    return torch.cat((plane.real, plane.imag), -1)


@pytest.mark.parametrize("normed", [False, True])
def test_place(fused, normed: bool) -> None:
    torch.manual_seed(0)
    heads, turns = Heads(6, 2, 16), table(50, 16)
    qkv, positions, write = (
        torch.randn(5, 10 * 16),
        torch.tensor([3, 49, 0, 7, 8]),
        torch.tensor([9, 2, 31, 5, 6]),
    )
    weight = torch.randn(8, 16)
    keys, values = torch.full((8, 4, 2, 16), -7.0), torch.full((8, 4, 2, 16), -7.0)
    turn = fused.turn(turns, positions)
    norm = HeadNorm(weight, 1e-5) if normed else None
    q = fused.place(qkv.clone(), heads, norm, turn, Places(write, keys, values))
    both = qkv[:, : 8 * 16].view(5, 8, 16).double()
    if normed:
        both = both / (both.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    true = turned(both, turns[positions])
    torch.testing.assert_close(q.double(), true[:, :6], atol=1e-5, rtol=0)
    torch.testing.assert_close(keys.view(32, 2, 16)[write].double(), true[:, 6:], atol=1e-5, rtol=0)
    assert torch.equal(values.view(32, 2, 16)[write], qkv[:, 8 * 16 :].view(5, 2, 16))
    assert (keys == -7).sum() == (values == -7).sum() == 27 * 2 * 16  # and nothing else was written


def test_gated(fused) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2 * 33)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(fused.gated(x, "silu").double(), F.silu(gate) * up, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [33, 1536, GRAIN + 7])
def test_no_bit_of_a_gated_row_depends_on_others(fused, threads, size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(5 if size > GRAIN else 70, 2 * size)
    whole = fused.gated(x, "silu")
    for start, stop in ((0, 1), (3, 5), (1, len(x))):
        assert torch.equal(fused.gated(x[start:stop].clone(), "silu"), whole[start:stop])


@pytest.mark.parametrize("size", [33, 576])
def test_no_bit_of_a_normed_or_turned_row_depends_on_others(fused, threads, size: int) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(150, size), torch.randn(size)
    heads, turns, qkv, positions = (
        Heads(11, 2, 24),
        table(400, 24),
        torch.randn(150, 15 * 24),
        torch.arange(150),
    )

    def place(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.zeros(150, 1, 2, 24), torch.zeros(150, 1, 2, 24)
        norm, turn = HeadNorm(torch.ones(13, 24), 1e-5), fused.turn(turns, positions[part])
        q = fused.place(qkv[part].clone(), heads, norm, turn, Places(positions[part], keys, values))
        return q, keys[part]

    normed, (q, keys) = fused.norm(x, weight, 1e-5), place(slice(None))
    for start, stop in ((0, 1), (3, 5), (1, 150)):
        part = slice(start, stop)
        assert torch.equal(fused.norm(x[part].clone(), weight, 1e-5), normed[part])
        again = place(part)
        assert torch.equal(again[0], q[part]) and torch.equal(again[1], keys[part])
