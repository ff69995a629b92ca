"""int8 products with the 8-bit kernels that torch carries for quantized models (FBGEMM).

Without VNNI these multiply bytes in pairs and add each pair in 16 bits, which saturate. Digits of 7 bits keep
below that: as bytes they are 0..128, and 2 x 128 x 127 = 32,512 fits. Twice the rows still cost less than a
float32 product (measured with one core, AVX2, 576 x 3,072: 1 row 0.09 ms against 0.15, 4 rows 0.2 against
0.43, 16 rows 0.72 against 0.93, 64 rows 3.5 against 3.6), and weights are read as bytes.

The kernels round x themselves. torch has announced that it will drop this interface one day; then `cannot`
says so and `exact` serves.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .base import DIGIT, INPUTS, LARGEST, Want, digits, not_cpu, total


class Fbgemm:
    """Bytes in pairs."""

    name = "fbgemm"
    order = 20

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights != "int8":
            return f"is for int8 weights, not {want.weights}"
        if reason := not_cpu(want):
            return reason
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return "this torch is built without FBGEMM"
        return _trial()

    def __init__(self, want: Want) -> None:
        self.unit = torch.tensor(1 / DIGIT)

    def pack(self, weight: Tensor) -> list[Any]:
        return [_pack(part.contiguous()) for part in weight.split(INPUTS, -1)]

    def unpack(self, packed: list[Any]) -> Tensor:
        unpack = torch.ops.quantized.linear_unpack
        return torch.cat([unpack(part)[0].int_repr() for part in packed], -1)

    def multiply(self, x: Tensor, packed: list[Any], wide: bool = False) -> Tensor:
        both = digits(x, self.unit)
        inputs = (both,) if len(packed) == 1 else both.split(INPUTS, -1)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        return total([product(part, 1.0, DIGIT // 2, w) for part, w in zip(inputs, packed, strict=True)])


def _pack(weight: Tensor) -> Any:
    with warnings.catch_warnings():  # torch announces that the interface will go: `cannot` watches for it
        warnings.simplefilter("ignore")
        quantized = torch._make_per_tensor_quantized_tensor(weight, 1.0, 0)  # pyright: ignore
        return torch.ops.quantized.linear_prepack(quantized, None)


def _trial() -> str | None:
    """Multiply the largest values there are: a kernel that saturates or is missing shows it."""
    row = torch.tensor([LARGEST, -LARGEST, LARGEST, 63.5] * 16)
    weight = torch.tensor([[127, -127, 127, -127] * 16, [127, 127, -127, 1] * 16], dtype=torch.int8)
    x = torch.stack((row, -row))
    try:
        found = Fbgemm(Want("int8")).multiply(x, [_pack(weight)])
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"this torch lacks its kernels ({str(error).splitlines()[0]})"
    true = x.round().double() @ weight.double().t()
    return None if torch.equal(found, true.float()) else "its sums are not exact here"


PLUGIN = Fbgemm
