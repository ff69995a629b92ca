"""Which of a library's ways is chosen, and when: with a library in Python, and a device whose clock each way moves."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trine.errors import Unsupported
from trine.kernels.gemm import choice, measured, vendor
from trine.kernels.gemm.base import Want
from trine.kernels.gemm.lt import ALIGNED, KINDS, Found, Lt, Sizes, load, suits
from trine.kernels.gemm.measured import Measured
from trine.kernels.gemm.vendor import Vendor

OUTS, INS, ROWS = 24, 16, 5
TORCHS = 1.0  # seconds that the usual product takes on the device below
TYPES = {number: dtype for dtype, number in KINDS.items()}


class Device:
    """A platform that knows what its work takes."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def event(self) -> Any:
        return Event(self)

    def occupy(self, seconds: float) -> None:
        """Before anything that is measured."""

    def stream_address(self) -> int:
        return 77


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def wait(self) -> None:
        self.device.waits += 1

    def since(self, earlier: Event) -> float:
        return self.at - earlier.at


class Library:
    """Functions of cublasLt.h over memory of the host. `costs`: seconds of each way; what is wrong with some:
    "fails", "lies" (wrong numbers), "refused" (by the search), "greedy" (wants too much memory)."""

    def __init__(self, device: Device, costs: list[float | str]) -> None:
        self.device, self.costs = device, costs
        self.made: dict[int, Any] = {}
        self.used: list[int] = []  # ways
        self.streams: set[int] = set()
        self.broken = ""  # a function that fails

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cublasLt") and name == self.broken:
            return lambda *values: 7
        return super().__getattribute__(name)

    def _new(self, target: Any, value: Any) -> int:
        number = len(self.made) + 1
        self.made[number] = value
        target._obj.value = number
        return 0

    def cublasLtCreate(self, target: Any) -> int:
        return self._new(target, "handle")

    def cublasLtMatmulDescCreate(self, target: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0), "sums are in float32"
        return self._new(target, {})

    def cublasLtMatmulPreferenceCreate(self, target: Any) -> int:
        return self._new(target, {})

    def cublasLtMatrixLayoutCreate(self, target: Any, kind: Any, inner: Any, outer: Any, line: Any) -> int:
        assert line.value == inner.value
        return self._new(target, (TYPES[kind.value], outer.value, inner.value))

    def _attribute(self, of: Any, attribute: Any, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.made[of.value][attribute.value] = value._obj.value
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _attribute

    def cublasLtMatmulPreferenceDestroy(self, of: Any) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *values: Any) -> int:
        _, product, weight, x, y, y2, search, most, found, count = values
        assert self.made[product.value] == {3: 1} and set(self.made[search.value]) == {1, 3}
        assert y is y2 and self.made[weight.value][2] == self.made[x.value][2]
        count._obj.value = min(len(self.costs), most.value)
        for i, cost in enumerate(self.costs[: most.value]):
            found[i].algorithm[0] = i
            found[i].state = int(cost == "refused")
            found[i].workspace = 2**40 if cost == "greedy" else 0
        return 0

    def cublasLtMatmul(self, handle: Any, product: Any, one: Any, *values: Any) -> int:
        w, weight, x, of_x, zero, c, of_c, y, of_y, algorithm, space, room, stream = values
        assert (one._obj.value, zero._obj.value, c, of_c) == (1.0, 0.0, y, of_y) and space and room
        way = algorithm._obj[0]
        self.used.append(way)
        self.streams.add(stream)
        cost = self.costs[way]
        if cost == "fails":
            return 13
        self.device.now += 0.5 if isinstance(cost, str) else cost
        result = self._tensor(x, of_x).float() @ self._tensor(w, weight).float().t()
        self._tensor(y, of_y).copy_(result * (1.5 if cost == "lies" else 1))
        return 0

    def _tensor(self, address: int, layout: Any) -> Tensor:
        dtype, rows, size = self.made[layout.value]
        memory = (ctypes.c_char * (rows * size * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(rows, size)


def tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Where a GPU's memory would begin: at a multiple of ALIGNED."""
    count = torch.Size(sizes).numel()
    whole = torch.randn(count + ALIGNED).to(dtype)
    start = -whole.data_ptr() % ALIGNED // whole.element_size()
    return whole[start : start + count].view(sizes)


class Bench:
    """A library with ways, and weights of three layers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, costs: list[float | str], usual: float = TORCHS
    ) -> None:
        monkeypatch.setattr(choice, "LITTLE_TO_GAIN", 1)
        torch.manual_seed(0)
        self.device, self.cost = Device(), usual
        self.library = Library(self.device, costs)
        self.measured = Measured(Lt(self.library, torch.empty(64), torch.bfloat16), self.device)
        self.weights = [tensor(OUTS, INS) for _ in range(3)]
        self.seen: list[int] = []  # weights of the usual product, by address

    def usual(self, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        self.device.now += self.cost
        self.seen.append(weight.data_ptr())
        return F.linear(x.float(), weight.float()).to(torch.float32 if wide else x.dtype)

    def meet(self, wide: bool = False) -> None:
        for weight in self.weights:
            self.measured.multiply(tensor(1, INS), weight, wide)

    def chosen(self, rows: int = ROWS, wide: bool = False) -> int | None:
        """Which way, by its place in `costs`."""
        self.meet(wide)
        self.measured.settle(rows, self.usual)
        way = self.measured.known[rows, OUTS, INS, wide]
        return None if way is None else way.algorithm._obj[0]


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ([1.0, 0.5, 0.7], 1),
        ([0.75, 0.75], 0),
        ([2.0, 1.5, 1.01], None),
        ([1.0, 0.995], None),  # not by enough
        ([0.98], 0),
        (["fails", 0.8, "lies", "refused", "greedy", 0.7], 5),
        (["fails", "lies"], None),
        ([], None),
        ([2.0] * choice.WAYS + [0.1], None),  # not asked for
    ],
)
def test_the_fastest_way_that_works_is_taken_if_it_gains(
    monkeypatch: pytest.MonkeyPatch, costs: list[float | str], best: int | None
) -> None:
    bench = Bench(monkeypatch, costs)
    assert bench.chosen() == best
    x, weight = tensor(ROWS, INS), bench.weights[1]
    bench.library.used.clear()
    found = bench.measured.multiply(x, weight, False)
    assert (found is None) == (best is None) and bench.library.used == ([] if best is None else [best])
    if found is not None:
        torch.testing.assert_close(found, F.linear(x.float(), weight.float()).bfloat16())
        assert bench.library.streams == {77}


def test_a_wide_product_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5])
    assert bench.chosen(wide=True) == 0
    x, weight = tensor(ROWS, INS), bench.weights[0]
    found = bench.measured.multiply(x, weight, True)
    assert found is not None and found.dtype == torch.float32
    torch.testing.assert_close(found, F.linear(x.float(), weight.float()))
    assert bench.measured.multiply(x, weight, False) is None


def test_weights_of_different_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5])
    bench.chosen()
    places = [[w.data_ptr() for w in bench.weights].index(address) for address in bench.seen]
    turns = [i % 3 for i in range(choice.TURNS)]
    assert places == [0, *turns * (1 + choice.ROUNDS)]


def test_nothing_is_chosen_but_when_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5])
    for rows in (1, 2, ROWS, 512):
        assert bench.measured.multiply(tensor(rows, INS), bench.weights[0], False) is None
    assert not bench.measured.known and not bench.library.used and not bench.device.waits
    assert bench.chosen() == 0 and bench.device.waits == 1 + choice.ROUNDS
    assert bench.measured.multiply(tensor(ROWS + 1, INS), bench.weights[0], False) is None


def test_a_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5, 0.7])
    assert bench.chosen() == 0
    bench.library.costs = [0.9, 0.1]
    waits = bench.device.waits
    assert bench.chosen() == 0 and bench.device.waits == waits
    assert bench.chosen(ROWS + 1) == 1


@pytest.mark.parametrize("rows", [0, 1, choice.MOST + 1])
def test_other_numbers_of_rows_are_not_measured(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    bench = Bench(monkeypatch, [0.5])
    bench.meet()
    bench.measured.settle(rows, bench.usual)
    assert not bench.measured.known


def test_what_does_not_lie_as_it_has_to_is_left_to_the_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5])
    assert bench.chosen() == 0
    weight = bench.weights[0]
    slanted = tensor(INS, ROWS).t()
    shifted = tensor(ROWS + 1, INS)[1:]
    for x in (slanted, shifted, tensor(ROWS, INS, dtype=torch.float32)):
        assert bench.measured.multiply(x, weight, False) is None
    assert suits(weight) and not suits(weight[1:]) and not suits(weight.t()) and not suits(tensor(20, INS))


def test_a_way_that_fails_later_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5])
    assert bench.chosen() == 0
    bench.library.broken = "cublasLtMatmul"
    x = tensor(ROWS, INS)
    assert bench.measured.multiply(x, bench.weights[0], False) is None
    bench.library.broken = ""
    assert bench.measured.multiply(x, bench.weights[0], False) is None


def test_turned_off_all_is_the_usual_and_choices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5])
    assert bench.chosen() == 0
    bench.measured.on = False
    assert bench.measured.multiply(tensor(ROWS, INS), bench.weights[0], False) is None
    bench.measured.on = True
    assert bench.measured.multiply(tensor(ROWS, INS), bench.weights[0], False) is not None


@pytest.mark.parametrize("broken", ["cublasLtMatmulDescCreate", "cublasLtMatmulAlgoGetHeuristic"])
def test_a_search_that_fails_leaves_the_usual(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    bench = Bench(monkeypatch, [0.5])
    bench.library.broken = broken
    assert bench.chosen() is None
    with pytest.raises(Unsupported, match=f"{broken} says 7"):
        bench.measured.lt.ways(Sizes(ROWS, OUTS, INS, False), 8)


def test_an_answer_is_as_large_as_the_library_writes_it() -> None:
    assert ctypes.sizeof(Found) == 64 + 8 + 4 + 4 + 16


@pytest.mark.parametrize(
    ("want", "why"),
    [
        (Want("bfloat16", device="rocm"), "is for CUDA, not rocm"),
        (Want("float32", device="cuda"), "float32 are not measured"),
    ],
)
def test_it_says_why_nothing_is_measured(want: Want, why: str) -> None:
    found, said = measured.measured(want)
    assert found is None and why in said


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_without_the_library_products_are_torchs() -> None:
    with pytest.raises(Unsupported, match="built without CUDA"):
        load()
    product = Vendor(Want("bfloat16", invariant=False, device="cuda"))
    assert product.measured is None and "without CUDA" in product.why
    product.settle(4)
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    assert torch.equal(product.multiply(x, product.pack(weight)), F.linear(x, weight))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(torch.version, "hip", None)
    found, said = measured.measured(Want("float16", device="cuda"))
    assert found is None and "libcublasLt.so.99 cannot be loaded" in said


def test_a_product_settles_with_what_it_would_do_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, [0.5])
    monkeypatch.setattr(vendor, "measured", lambda want: (bench.measured, ""))
    product = Vendor(Want("bfloat16", invariant=False, device="cuda"))
    monkeypatch.setattr(product, "_usual", bench.usual)
    x, weight = tensor(ROWS, INS), bench.weights[0]
    product.multiply(x, weight)
    product.settle(ROWS)
    bench.library.used.clear()
    found = product.multiply(x, weight)
    assert bench.library.used == [0]
    torch.testing.assert_close(found, F.linear(x.float(), weight.float()).bfloat16())
