"""Every int8 product against the true integer sum; float products row by row; how one is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trine.errors import Unsupported
from trine.kernels.gemm.base import INPUTS, LARGEST, Want
from trine.kernels.gemm.fbgemm import Fbgemm
from trine.kernels.select import select
from trine.registry import find

PRODUCTS = find("kernels.gemm")
VNNI = ("avx2", "vnni")  # int_mm is right without it too, only slow
INT8 = sorted(
    name for name, product in PRODUCTS.items() if product.cannot(Want("int8", features=VNNI)) is None
)


def numbers(rows: int, outs: int, ins: int) -> tuple[Tensor, Tensor]:
    """Random ones, ties, and the largest that there may be."""
    torch.manual_seed(ins + rows)
    weight = torch.randint(-127, 128, (outs, ins), dtype=torch.int8)
    x = (torch.randn(rows, ins) * LARGEST / 3).clamp(-LARGEST, LARGEST)
    x[:, ::3] = x[:, ::3].round().clamp(-LARGEST + 1, LARGEST - 1) + 0.5
    x[0], weight[0], weight[1] = LARGEST, 127, -127
    return x, weight


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("ins", [1, 33, 576, INPUTS, INPUTS + 1, 3 * INPUTS])
def test_int8_sums_are_the_nearest_to_the_true_ones(name: str, ins: int) -> None:
    product = PRODUCTS[name](Want("int8", features=VNNI))
    for rows in (1, 2, 7):
        x, weight = numbers(rows, 70, ins)
        packed = product.pack(weight)
        true = (x.round().long() @ weight.long().t()).to(torch.float32)
        assert torch.equal(product.multiply(x, packed), true)
        assert torch.equal(product.unpack(packed), weight)


def test_there_is_more_than_one_int8_product() -> None:
    assert {"exact", "fbgemm", "int_mm"} <= set(INT8) | {"fbgemm" if Fbgemm.cannot(Want("int8")) else ""}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_float_rows_do_not_depend_on_their_neighbours(dtype: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product = PRODUCTS["reference"](Want(dtype))
        torch.manual_seed(0)
        x, weight = torch.randn(37, 96), torch.randn(3000, 96).to(getattr(torch, dtype))
        product.scratch.elements = 96 * 1024  # several parts
        packed = product.pack(weight)
        whole = product.multiply(x, packed)
        torch.testing.assert_close(whole, x @ weight.float().t())
        for start, stop in ((0, 1), (5, 7), (8, 17), (3, 37)):
            assert torch.equal(product.multiply(x[start:stop], packed), whole[start:stop])
    finally:
        torch.set_num_threads(before)


def test_float_rows_that_may_depend_are_close() -> None:
    product = PRODUCTS["reference"](Want("float32", invariant=False))
    torch.manual_seed(0)
    x, weight = torch.randn(5, 30), torch.randn(20, 30)
    torch.testing.assert_close(product.multiply(x, product.pack(weight)), x @ weight.t())


@pytest.mark.parametrize(
    ("features", "chosen", "why"),
    [
        (VNNI, "int_mm", "the first that can"),
        (("avx2",), "fbgemm", "int_mm cannot: this CPU has neither VNNI nor AMX"),
    ],
)
def test_the_choice_keeps_its_reasons(features: tuple[str, ...], chosen: str, why: str) -> None:
    found = select("kernels.gemm", Want("int8", features=features))
    if chosen in INT8:
        assert found.name == chosen and why in found.why
    assert {answer.name for answer in found.answers} == set(PRODUCTS)
    assert any(line.startswith("reference: cannot: ") for line in found.lines())


@pytest.mark.parametrize(
    ("want", "forced", "said"),
    [
        (Want("int8"), "int_mm", "was asked for and cannot: this CPU has neither"),
        (Want("int8"), "nothing", "there are: "),
        (Want("float64"), "auto", "reference cannot: is for float weights"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(want: Any, forced: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        select("kernels.gemm", want, forced)
