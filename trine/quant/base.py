"""The contract of a quantization: it owns a linear layer's weight and its product.

A linear's weight is [outs, ins], often merged from several tensors of a checkpoint: `load` is called with
runs of its rows, in any order, then `finish` once. It does not know names, models or where weights come from.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from trine.kernels.gemm.base import Behind


class Holder(Protocol):
    """What a quantization may keep on a linear layer: tensors by name, under names of its own."""

    outs: int
    ins: int
    weight: Any  # what the product made of the weight; None until `create`
    scale: Tensor | None


class Quant(Protocol):
    """A way to store weights and to multiply by them."""

    name: str

    def __init__(self, product: Any, dtype: str) -> None:
        """`product` serves weights of `dtype`: see kernels.gemm.base.Want."""
        ...

    def create(self, linear: Holder) -> None:
        """Make room."""
        ...

    def load(self, linear: Holder, start: int, rows: Tensor) -> None:
        """Rows of the weight, from `start` on, as the checkpoint has them."""
        ...

    def finish(self, linear: Holder) -> None:
        """After loading: repack for the product."""
        ...

    def tie(self, linear: Holder, weight: Tensor) -> None:
        """Instead of `load` and `finish`: the weight of an embedding, which may be shared."""
        ...

    def apply(self, linear: Holder, x: Tensor, wide: bool = False) -> Tensor:
        """[tokens, ins] -> [tokens, outs], without the bias; in float32 if `wide`, else of x's dtype."""
        ...

    def fuse(
        self, linear: Holder, x: Tensor, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor | None:
        """The product with what stands before and behind it, in one launch; None: it has to be done apart."""
        ...

    def dequantize(self, linear: Holder) -> Tensor:
        """The weight that `apply` multiplies by, in float32: tests compare the two."""
        ...
