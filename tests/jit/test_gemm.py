"""Products in Triton against float64: one row, few rows, any number with the same bits; and what is fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from trine.kernels.fused.triton import Triton
from trine.kernels.gemm.base import Behind, Want
from trine.kernels.gemm.choice import Burst, Choice, Shape
from trine.kernels.gemm.fixed import Fixed
from trine.kernels.gemm.vendor import Vendor

DTYPES = ["float32", "bfloat16", "float16"]
STEP = {"float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-9}  # the interpreter cuts bfloat16 off


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as integers, and would multiply these."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float, tl

    plain = InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = _convert_float(handle.data, tl.bfloat16, tl.float32, None).view("float32")
        return TensorHandle(data, tl.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return plain(self, wide(a), wide(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def numbers(rows: int, outs: int, ins: int, dtype: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + outs + ins)
    kind = getattr(torch, dtype)
    return torch.randn(rows, ins).to(kind), (torch.randn(outs, ins) / ins**0.5).to(kind)


def near(found: Tensor, true: Tensor, dtype: str) -> None:
    torch.testing.assert_close(found.double(), true, atol=STEP[dtype], rtol=STEP[dtype])


class Tiled(Choice):
    """All few rows are tiles."""

    def few(self, rows: int, outs: int, ins: int) -> Shape | None:
        return Shape(16 if rows <= 16 else 32, 64, 32, 4, 3) if rows <= 32 and ins % 8 == 0 else None


def vendor(dtype: str) -> Vendor:
    want = Want(dtype, invariant=False, device="cuda", cores=5)
    product = Vendor(want)
    product.choice = Tiled(want)
    return product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "ins"), [(5, 8), (70, 96), (66, 520), (135, 160)])
@pytest.mark.parametrize("rows", [1, 2, 17, 70])
def test_vendor(rows: int, outs: int, ins: int, dtype: str) -> None:
    product = vendor(dtype)
    x, weight = numbers(rows, outs, ins, dtype)
    packed = product.pack(weight)
    true = x.double() @ weight.double().t()
    found = product.multiply(x, packed)
    assert found.dtype == x.dtype and torch.equal(product.unpack(packed), weight)
    near(found, true, dtype)
    wide = product.multiply(x, packed, wide=True)
    assert wide.dtype == torch.float32
    near(wide, true, "float32" if rows <= 32 else dtype)
    if product.tiles:
        assert not product.tiles.count.any()


@pytest.mark.parametrize(("room", "split"), [(6 * 512, True), (6 * 512 - 1, False)])
def test_products_are_split_where_all_their_sums_have_room(
    room: int, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Fixed(Want("float32", device="cuda"))
    part = product.tiles.part = torch.full((room,), float("nan"))
    monkeypatch.setattr("trine.kernels.gemm.tiles.SPLITS", room)
    monkeypatch.setattr("trine.kernels.gemm.tiles.TILE", 1)
    x, weight = numbers(20, 32, 200, "float32")
    found = product.tiles.product(x, weight, torch.empty(20, 32), Shape(32, 16, 16, 4, 2), 3, Behind())
    near(found, x.double() @ weight.double().t(), "float32")
    assert bool(part.isnan().all()) is not split


def test_choices_of_shapes() -> None:
    modern = Choice(Want("bfloat16", False, "cuda", capability=(9, 0)))
    assert modern.one(4096, 4096, 1) == Burst(1, 8) and modern.one(14336, 4096, 2) == Burst(1, 16)
    assert modern.one(128256, 4096, 1) == Burst(2, 16) and modern.one(4096, 14336, 1) == Burst(1, 16)
    assert modern.one(9, 13, 1) is None and modern.one(9, 65536, 1) is None
    assert modern.few(50, 128256, 4096) is not None and modern.few(65, 128256, 4096) is None
    assert Choice(Want("bfloat16", False, "rocm")).few(50, 128256, 4096) is None
    assert Choice(Want("float32", False, "cuda", capability=(9, 0))).few(50, 128256, 4096) is None
    assert modern.norms(4096, 1024) and not modern.norms(28672, 4096)


def test_rows_that_do_not_lie_at_16_bytes_go_to_the_library() -> None:
    product = vendor("bfloat16")
    x, weight = numbers(2, 6, 13, "bfloat16")
    near(product.multiply(x, product.pack(weight)), x.double() @ weight.double().t(), "bfloat16")
    assert product.fuse(x, weight, None, Behind()) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "ins"), [(100, 70), (70, 1100)])
def test_no_bit_of_a_fixed_row_depends_on_the_number_of_rows(outs: int, ins: int, dtype: str) -> None:
    product = Fixed(Want(dtype, device="cuda"))
    product.shape = Shape(16, 64, 64, 4, 2)
    x, weight = numbers(20, outs, ins, dtype)
    packed = product.pack(weight)
    for wide in (False, True):
        whole = product.multiply(x, packed, wide)
        near(whole, x.double() @ weight.double().t(), "float32" if wide else dtype)
        for start, stop in ((0, 1), (3, 20)):
            assert torch.equal(product.multiply(x[start:stop], packed, wide), whole[start:stop])


@pytest.mark.parametrize("split", [False, True])
def test_segments_add_up_alike_in_one_program_and_in_several(
    split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Fixed(Want("float32", device="cuda"))
    x, weight = numbers(20, 70, 200, "float32")
    out = torch.empty(20, 70)
    product.tiles.product(x, weight, out, Shape(16, 64, 16, 4, 2), 3, Behind())
    monkeypatch.setattr("trine.kernels.gemm.tiles.SPLITS", 264 if split else 1)
    again = product.tiles.product(x, weight, torch.empty(20, 70), Shape(16, 64, 16, 4, 2), 3, Behind())
    assert torch.equal(out, again) and not product.tiles.count.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_stands_beside_a_product_may_be_part_of_it(rows: int, dtype: str) -> None:
    product, fused = vendor(dtype), Triton()
    x, weight = numbers(rows, 70, 96, dtype)
    residual = torch.randn(rows, 70).to(x.dtype)
    plain = product.multiply(x, weight)
    total = product.fuse(x, weight, None, Behind(residual.clone()))
    assert total is not None
    if dtype == "bfloat16":
        near(total, plain.double() + residual.double(), dtype)
    else:
        assert torch.equal(total, plain + residual)
    for activation in ("silu", "gelu_tanh"):
        found = product.fuse(x, weight, None, Behind(activation=activation))
        assert found is not None
        near(found, fused.gated(plain, activation).double(), dtype)
    gain = torch.randn(96)
    found = product.fuse(x, weight, (gain, 1e-5), Behind(activation="silu"))
    if rows > 1:
        assert found is None
        return
    normed = fused.norm(x, gain, 1e-5)
    near(found, fused.gated(product.multiply(normed, weight), "silu").double(), dtype)


@pytest.mark.parametrize("product", [Vendor, Fixed])
def test_who_can(product: type[Vendor] | type[Fixed]) -> None:
    able = Want("bfloat16", invariant=False, device="cuda")
    assert product.cannot(able) is None and product.cannot(Want("float32", False, "rocm")) is None
    assert "not cpu" in str(product.cannot(Want("bfloat16", False)))
    assert "not int8" in str(product.cannot(Want("int8", False, "cuda")))
    assert (product.cannot(Want("bfloat16", True, "cuda")) is None) == (product is Fixed)


@pytest.mark.parametrize("rows", [1, 3, 80])
def test_nothing_to_multiply_is_nothing(rows: int) -> None:
    x, weight = numbers(rows, 9, 16, "bfloat16")
    assert Fixed(Want("bfloat16", device="cuda")).multiply(x[:0], weight).shape == (0, 9)
    assert Vendor(Want("bfloat16", False, "cuda")).multiply(x[:0], weight).shape == (0, 9)
