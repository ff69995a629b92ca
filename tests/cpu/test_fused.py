"""Norms, rotation and gated activation against plain formulas in float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from trine.kernels.fused.reference import GRAIN
from trine.registry import find

BACKENDS = sorted(find("kernels.fused"))


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
    torch.testing.assert_close(fused.norm(x, weight, torch.tensor(1e-5)).double(), true, atol=1e-5, rtol=0)


def test_rotate(fused) -> None:
    torch.manual_seed(0)
    x, angle = torch.randn(6, 3, 16), torch.randn(6, 1, 8)
    cos, sin = angle.cos(), angle.sin()
    found = fused.rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    plane = torch.complex(x[..., :8].double(), x[..., 8:].double())
    turned = plane * torch.polar(torch.ones_like(angle).double(), angle.double())
    torch.testing.assert_close(found.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-5, rtol=0)


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
    x, weight, eps = torch.randn(150, size), torch.randn(size), torch.tensor(1e-5)
    q, cos, sin = torch.randn(150, 13, 24), torch.randn(150, 1, 24), torch.randn(150, 1, 24)
    normed, turned = fused.norm(x, weight, eps), fused.rotate(q, cos, sin)
    for start, stop in ((0, 1), (3, 5), (1, 150)):
        part = slice(start, stop)
        assert torch.equal(fused.norm(x[part].clone(), weight, eps), normed[part])
        assert torch.equal(fused.rotate(q[part].clone(), cos[part].clone(), sin[part].clone()), turned[part])
