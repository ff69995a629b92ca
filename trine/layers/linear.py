"""One Linear: several merged weights, one product. It does not know how weights are stored or multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trine.errors import Unsupported
from trine.kernels.gemm.base import Behind
from trine.parallel.mesh import Mesh
from trine.quant.base import Quant

from .norm import Norm
from .part import Part


class Linear(Part):
    """y = x W^T + b.

    `outs` are groups of sizes. Each size is a weight of its own in a checkpoint; all are one product; each
    group comes out as one tensor: `[[q, k], [v]]` gives q and k side by side, and v.
    `wide`: results are float32, whatever x is.
    `split`: "out" divides the outputs over the tensor axis, "in" the inputs (and sums the result)."""

    def __init__(
        self,
        ins: int,
        outs: Sequence[Sequence[int]],
        split: str | None,
        bias: bool,
        quant: Quant,
        mesh: Mesh,
        wide: bool = False,
    ) -> None:
        super().__init__()
        if mesh.tensor.size > 1:
            raise Unsupported("weights cannot be divided yet: the tensor axis must be of size one")
        self.ins, self.split, self.quant, self.axis, self.wide = ins, split, quant, mesh.tensor, wide
        self.parts = [size for group in outs for size in group]
        self.starts = [0, *accumulate(self.parts)]
        self.groups = [sum(group) for group in outs]
        self.outs = sum(self.parts)
        self.weight: Any = None
        self.scale: Tensor | None = None
        self.bias = torch.empty(self.outs) if bias else None
        self.takes_blocks = quant.name == "blocks"

    def forward(self, x: Tensor) -> Any:
        y = self.quant.apply(self, x, self.wide)
        if self.split == "in":
            y = self.axis.sum(y)
        if self.bias is not None:
            y.add_(self.bias)
        return y if len(self.groups) == 1 else y.split(self.groups, -1)

    def normed(
        self, norm: Norm, x: Tensor | None, residual: Tensor, activation: str = ""
    ) -> tuple[Tensor, Tensor]:
        """(this product of the norm of x + residual, x + residual).

        `x`: what is not yet added to the residual; None: all is. `activation`: the product is gate and up, and
        they become one. Where the product can do norm or activation on its way, there is one launch less."""
        if x is None and self.bias is None and not self.wide:
            fused = self.quant.fuse(self, residual, (norm.weight, norm.eps), Behind(None, activation))
            if fused is not None:
                return fused, residual
        normal, residual = norm(x, residual)
        if activation:
            fused = (
                None
                if self.bias is not None
                else self.quant.fuse(self, normal, None, Behind(None, activation))
            )
            return norm.fused.gated(self(normal), activation) if fused is None else fused, residual
        return self(normal), residual

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """(what of this product is not yet added to the residual, the residual)."""
        if self.bias is None and self.axis.size == 1:
            fused = self.quant.fuse(self, x, None, Behind(residual))
            if fused is not None:
                return None, fused
        return self(x), residual

    def wants(self) -> dict[str, tuple[int, ...]]:
        names = [f"{i}." for i in range(len(self.parts))] if len(self.parts) > 1 else [""]
        sizes = list(zip(names, self.parts, strict=True))
        found: dict[str, tuple[int, ...]] = {f"{name}weight": (size, self.ins) for name, size in sizes}
        if self.bias is not None:
            found |= {f"{name}bias": (size,) for name, size in sizes}
        return found

    def put(self, name: str, tensor: Tensor) -> None:
        part, _, kind = name.rpartition(".")
        start = self.starts[int(part or 0)]
        if kind == "bias":
            assert self.bias is not None
            self.bias[start : start + len(tensor)] = tensor
            return
        if self.weight is None:
            self.quant.create(self)
        self.quant.load(self, start, tensor)

    def finish(self) -> None:
        self.quant.finish(self)

    def tie(self, weight: Tensor) -> None:
        """Take the weight of an embedding instead of one from the checkpoint."""
        self.quant.tie(self, weight)

    def dequantized(self) -> Tensor:
        """[outs, ins] float32: the weight that the product multiplies by."""
        return self.quant.dequantize(self)
