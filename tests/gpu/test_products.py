"""Measured products on a GPU: every way gives what torch gives, recorded or not; and choosing does not harm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trine.kernels.gemm import choice
from trine.kernels.gemm.base import Want
from trine.kernels.gemm.lt import Sizes
from trine.kernels.gemm.vendor import Vendor
from trine.registry import find

SIZES = [(6144, 4096), (4096, 1024), (1024, 3072), (32064, 2048)]  # outs, ins
NEAR = {
    torch.float32: 1e-4,
    torch.bfloat16: 6e-3,
    torch.float16: 8e-4,
}  # of the result's length: one rounding


@pytest.fixture(scope="module")
def platform() -> Any:
    return next(kind for name, kind in find("platforms").items() if name != "cpu" and kind.cannot() is None)()


def made(platform: Any, dtype: str) -> Vendor:
    facts = platform.facts()
    with platform.device():
        want = Want(dtype, False, facts.kind, capability=facts.capability, cores=facts.cores)
        product = Vendor(want)
    if product.measured is None:
        pytest.skip(product.why)
    return product


def numbers(*sizes: int, dtype: str) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator, device="cuda").to(getattr(torch, dtype))


def off(found: Tensor, x: Tensor, weight: Tensor) -> float:
    true = F.linear(x.double(), weight.double())
    return ((found.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("outs", "ins"), SIZES)
def test_every_way_gives_what_torch_gives(platform: Any, dtype: str, wide: bool, outs: int, ins: int) -> None:
    product = made(platform, dtype)
    assert product.measured is not None
    weight = product.pack(numbers(outs, ins, dtype=dtype))
    counts = []
    for rows in (2, 7, 50, 128, 333, 512):
        x, sizes = numbers(rows, ins, dtype=dtype), Sizes(rows, outs, ins, wide)
        ways = product.measured.lt.ways(sizes, choice.WAYS)
        counts.append(len(ways))
        for way in ways:
            product.measured.known[sizes] = way
            found = product.multiply(x, weight, wide)
            assert product.measured.known[sizes] is way, "it failed"
            assert found.dtype == (torch.float32 if wide else x.dtype) and found.shape == (rows, outs)
            assert off(found, x, weight) < NEAR[found.dtype]
    assert min(counts) > 0 and max(counts) > 1, counts


@pytest.mark.parametrize("wide", [False, True])
def test_recorded_products_are_the_eager_ones(platform: Any, wide: bool) -> None:
    product, graph = made(platform, "bfloat16"), platform.graph()
    assert product.measured is not None
    weight = product.pack(numbers(4096, 4096, dtype="bfloat16"))
    for rows in (8, 56, 160):
        x = numbers(rows, 4096, dtype="bfloat16")
        sizes = Sizes(rows, 4096, 4096, wide)
        for way in product.measured.lt.ways(sizes, choice.WAYS):
            product.measured.known[sizes] = way
            product.multiply(x, weight, wide)
            captured = graph.capture(lambda x=x: product.multiply(x, weight, wide))
            kept = x.clone()
            for _ in range(2):
                x.neg_()
                captured.replay()
                assert torch.equal(captured.value, product.multiply(x, weight, wide))
            assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_choices_stay_and_nothing_waits_for_the_device_after_them(platform: Any, dtype: str) -> None:
    product = made(platform, dtype)
    assert product.measured is not None
    weights = [product.pack(numbers(outs, ins, dtype=dtype)) for outs, ins in SIZES for _ in range(2)]
    state = torch.cuda.get_rng_state()
    for weight in weights:
        product.multiply(numbers(3, weight.shape[1], dtype=dtype), weight)
    for rows in (2, 48, 256):
        product.settle(rows)
        before = dict(product.measured.known)
        assert {sizes[1:3] for sizes in before if sizes[0] == rows} == set(SIZES)
        product.settle(rows)
        assert product.measured.known == before
        for weight in weights:
            x = numbers(rows, weight.shape[1], dtype=dtype)
            first = product.multiply(x, weight)
            assert off(first, x, weight) < NEAR[x.dtype]
            assert torch.equal(first, product.multiply(x, weight)), "a choice gives the same bits again"
    assert torch.equal(torch.cuda.get_rng_state(), state), "others' chances are left alone"
    x = numbers(48, SIZES[0][1], dtype=dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        product.multiply(x, weights[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
