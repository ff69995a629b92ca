"""int8 products with the 8-bit kernels that torch carries for quantized models (FBGEMM).

Without VNNI these multiply bytes in pairs and add each pair in 16 bits, which saturate: 2 x 127 x 255 does
not fit. So x is given as two rows whose sum it is, each within -64..64: then 2 x 127 x 128 = 32,512 fits,
every sum is exact, and twice the rows still cost less than float32 (measured with one core, AVX2, 576 x 3,072:
1 row 0.09 ms against 0.15, 4 rows 0.2 against 0.43, 16 rows 0.72 against 0.93, 64 rows 3.5 against 3.6).

The kernels round x themselves. torch has announced that it will drop this interface one day; then `cannot`
says so and `exact` serves.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .base import EXACT_INPUTS, Want, total

HALF = 64  # what one of the two rows may hold
INPUTS = 2 * EXACT_INPUTS - 16  # 64 x 127 x 2,064 is less than 2^24


class Pair:
    """int8 as two rows of 7 bits."""

    name = "pair"
    order = 20

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights != "int8":
            return f"is for int8 weights, not {want.weights}"
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return "this torch is built without FBGEMM"
        return _trial()

    def __init__(self, want: Want) -> None: ...

    def pack(self, weight: Tensor) -> list[Any]:
        return [_pack(part.contiguous()) for part in weight.split(INPUTS, -1)]

    def unpack(self, packed: list[Any]) -> Tensor:
        unpack = torch.ops.quantized.linear_unpack
        return torch.cat([unpack(part)[0].int_repr() for part in packed], -1)

    def multiply(self, x: Tensor, packed: list[Any]) -> Tensor:
        rows = x.shape[0]
        near = x.clamp(-HALF, HALF)
        both = torch.cat((near, x - near))  # [2 rows, ins]
        inputs = (both,) if len(packed) == 1 else both.split(INPUTS, -1)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        sums = [product(part, 1.0, HALF, w) for part, w in zip(inputs, packed, strict=True)]
        return total([y[:rows].add_(y[rows:]) for y in sums])


def _pack(weight: Tensor) -> Any:
    with warnings.catch_warnings():  # torch announces that the interface will go: `cannot` watches for it
        warnings.simplefilter("ignore")
        quantized = torch._make_per_tensor_quantized_tensor(weight, 1.0, 0)
        return torch.ops.quantized.linear_prepack(quantized, None)


def _trial() -> str | None:
    """Multiply the largest values there are: a kernel that saturates or is missing shows it."""
    x = torch.tensor([[127.0, -127.0, 127.0, 63.5] * 16, [-127.0, 127.0, -127.0, -62.5] * 16])
    weight = torch.tensor([[127, -127, 127, -127] * 16, [127, 127, -127, 1] * 16], dtype=torch.int8)
    try:
        found = Pair(Want("int8")).multiply(x, [_pack(weight)])
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"this torch lacks its kernels ({str(error).splitlines()[0]})"
    return None if torch.equal(found, x.round() @ weight.float().t()) else "its sums are not exact here"


PLUGIN = Pair
