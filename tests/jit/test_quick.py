"""Launching without asking Triton each time: calls that it tells apart are told apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trine.kernels.jit import Quick, kind, quick

pytest.importorskip("triton")

MEMORY = torch.zeros(64, dtype=torch.float32)
TENSORS = [
    MEMORY[first:].view(dtype) for first in range(5) for dtype in (torch.float32, torch.int32, torch.bfloat16)
]
VALUES = st.one_of(
    st.sampled_from(
        [0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 16]
    ),
    st.integers(-(2**63), 2**64 - 1),
    st.booleans(),
    st.floats(),
    st.sampled_from(TENSORS),
    st.none(),
)


@given(VALUES, VALUES)
def test_values_of_one_kind_are_the_same_to_triton(a: Any, b: Any) -> None:
    from triton._C.libtriton import native_specialize_impl  # pyright: ignore
    from triton.backends.nvidia.compiler import CUDABackend

    def seen(value: Any) -> Any:
        return native_specialize_impl(CUDABackend, value, False, True, True)

    if kind(a) == kind(b):
        assert seen(a) == seen(b)


class Kernel:
    """Counts what is compiled, and what is launched of it."""

    arg_names = ("X", "n", "BLOCK", "FLAG")
    params = tuple(SimpleNamespace(is_constexpr=name.isupper() and name != "X") for name in arg_names)

    def __init__(self) -> None:
        self.compiled = 0
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.compiled += 1
            return SimpleNamespace(
                run=lambda *a: self.launched.append(a), function=self.compiled, packed_metadata=0
            )

        return call


def test_a_form_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.kernels.jit._stream", lambda: 7)
    kernel = Kernel()
    fast, x = Quick(kernel), MEMORY
    for n in (2, 3, 5):
        fast[3,](x, n, 64, FLAG=True, num_warps=4)
    assert kernel.compiled == 1
    assert [a[:5] for a in kernel.launched] == [(3, 1, 1, 7, 1)] * 2
    assert [a[9:] for a in kernel.launched] == [(x, 3, 64, True), (x, 5, 64, True)]
    for args, more in (
        ((x, 16, 64), {"FLAG": True, "num_warps": 4}),
        ((x, 1, 64), {"FLAG": True, "num_warps": 4}),
        ((x[1:], 2, 64), {"FLAG": True, "num_warps": 4}),
        ((x, 2, 32), {"FLAG": True, "num_warps": 4}),
        ((x, 2, 64), {"FLAG": False, "num_warps": 4}),
        ((x, 2, 64), {"FLAG": True, "num_warps": 8}),
    ):
        before = kernel.compiled
        fast[2, 2](*args, **more)
        assert kernel.compiled == before + 1
        fast[2, 2](*args, **more)
        assert kernel.compiled == before + 1
        assert kernel.launched[-1][:3] == (2, 2, 1)


def test_what_is_no_constant_is_given_by_place() -> None:
    with pytest.raises(AssertionError, match="by place"):
        Quick(Kernel())[1,](MEMORY, n=2, BLOCK=4, FLAG=True)


def test_the_interpreter_runs_the_module_itself() -> None:
    from trine.kernels.jit import fused

    assert quick(fused) is fused
