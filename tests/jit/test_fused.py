"""The small operations in Triton against plain torch in float64, at odd sizes and in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from trine.kernels.fused.base import HeadNorm, Heads, Places, Want
from trine.kernels.fused.triton import Triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUSED = Triton()


def near(found: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    """Within two roundings to the dtype; the interpreter cuts bfloat16 off instead of rounding it."""
    step = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, 2**-3)
    torch.testing.assert_close(found.double(), true.double(), atol=step, rtol=step)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 33, 96, 1024])
def test_norm_with_and_without_a_residual(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype)
    weight = torch.randn(size)
    near(FUSED.norm(x, weight, 1e-5), normed(x, weight, 1e-5), dtype)
    same, first = FUSED.add_norm(x.clone(), None, weight, 1e-5)
    assert torch.equal(first, x) and torch.equal(same, FUSED.norm(x, weight, 1e-5))
    found, total = FUSED.add_norm(x.clone(), residual.clone(), weight, 1e-5)
    if dtype == torch.bfloat16:
        near(total, x.double() + residual.double(), dtype)
    else:
        assert torch.equal(total, x + residual)
    near(found, normed(total, weight, 1e-5), dtype)


def test_norm_of_heads_repeats_its_weights() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 5, 24), torch.randn(5, 24)
    near(FUSED.norm(x, weight, 1e-6), normed(x, weight, 1e-6), torch.float32)


def test_a_row_that_is_not_a_number_stays_alone() -> None:
    x = torch.ones(3, 40)
    x[1] = float("nan")
    found = FUSED.norm(x, torch.ones(40), 1e-6)
    assert found[1].isnan().all() and not found[::2].isnan().any()


def table(positions: int, dim: int, exact: bool) -> Tensor:
    angle = torch.randn(positions, dim // 2)
    if exact:
        quarter = angle.sign()
        return torch.cat((0 * quarter, 0 * quarter, -quarter, quarter), -1)
    return torch.cat((angle.cos(), angle.cos(), -angle.sin(), angle.sin()), -1)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.double()[:, None].chunk(2, -1)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def placed(
    heads: Heads, dtype: torch.dtype, store: torch.dtype, norm: bool, kind: torch.dtype, gap: int
) -> None:
    torch.manual_seed(heads.dim)
    tokens, count = 5, heads.queries + 2 * heads.keys
    exact = store.itemsize == 1  # the interpreter rounds to 8 bits wrongly: nothing is to be rounded
    qkv = torch.randn(tokens, count * heads.dim).to(dtype)
    qkv = qkv.mul(3).round() if exact else qkv
    angles, positions = table(30, heads.dim, exact), torch.tensor([0, 7, 29, 7, 1], dtype=kind)
    both = (
        torch.zeros(4, 4, heads.keys + gap, heads.dim).to(store),
        torch.zeros(4, 4, heads.keys + gap, heads.dim).to(store),
    )
    keys, values = both[0][:, :, : heads.keys], both[1][:, :, : heads.keys]
    write = torch.tensor([15, 3, 0, 8, 9], dtype=kind)
    weight = HeadNorm(torch.randn(heads.queries + heads.keys, heads.dim), 1e-5) if norm else None
    q = FUSED.place(qkv, heads, weight, FUSED.turn(angles, positions), Places(write, keys, values))
    x = qkv.double().view(tokens, count, heads.dim)
    qk = x[:, : heads.queries + heads.keys]
    qk = turned(normed(qk, *weight) if weight else qk, angles[positions.long()])
    near(q, qk[:, : heads.queries], dtype)
    where = write.long()
    near(keys.float().flatten(0, 1)[where], qk[:, heads.queries :], store)
    near(values.float().flatten(0, 1)[where], x[:, -heads.keys :], store)
    others = torch.ones(16, dtype=torch.bool).index_fill(0, where, False)
    assert not keys.float().flatten(0, 1)[others].any() and not values.float().flatten(0, 1)[others].any()
    assert not gap or not both[0].float()[:, :, heads.keys :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 20), Heads(14, 7, 6)], ids=str)
def test_place(heads: Heads, dtype: torch.dtype, norm: bool) -> None:
    placed(heads, dtype, dtype, norm, torch.int32 if norm else torch.int64, 0)


def test_place_in_a_store_whose_positions_lie_apart() -> None:
    placed(Heads(4, 2, 16), torch.bfloat16, torch.bfloat16, True, torch.int32, 3)


@pytest.mark.parametrize("store", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_store_of_8_bits_is_clamped(store: torch.dtype) -> None:
    placed(Heads(4, 2, 16), torch.bfloat16, store, False, torch.int32, 0)
    heads, most = Heads(1, 1, 4), torch.finfo(store).max
    qkv = torch.tensor([[1.0] * 4 + [1e6, -1e6, 1.0, 0.0] + [-1e6, 1e6, 1.0, 0.0]])
    keys, values = torch.zeros(1, 2, 1, 4).to(store), torch.zeros(1, 2, 1, 4).to(store)
    still = torch.tensor([[1.0] * 4 + [0.0] * 4])
    one = torch.tensor([1], dtype=torch.int32)
    FUSED.place(qkv, heads, None, FUSED.turn(still, one - 1), Places(one, keys, values))
    assert keys.float()[0, 1, 0].tolist() == [most, -most, 1.0, 0.0]
    assert values.float()[0, 1, 0].tolist() == [-most, most, 1.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 96, 700])
def test_gated(dtype: torch.dtype, activation: str, size: int) -> None:
    torch.manual_seed(size)
    x = (3 * torch.randn(3, 2 * size)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    act: Any = (
        torch.nn.functional.silu
        if activation == "silu"
        else lambda v: torch.nn.functional.gelu(v, approximate="tanh")
    )
    true = act(gate) * up
    found = FUSED.gated(x, activation)
    torch.testing.assert_close(
        found.double(), true, atol=2e-5, rtol={torch.float32: 2e-5, torch.float16: 2**-7}.get(dtype, 2**-6)
    )


def test_nothing_to_do_is_nothing() -> None:
    assert FUSED.norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert FUSED.gated(torch.empty(0, 8), "silu").shape == (0, 4)


def test_who_can() -> None:
    assert Triton.cannot(Want(device="cpu")) == "is for GPUs, not cpu"
    assert Triton.cannot(Want(device="cuda")) is None and Triton.cannot(Want(device="rocm")) is None
