"""Float products on a GPU: the vendor's library as torch calls it, and Triton where few rows make it faster.

One row is a GEMV, a few may be narrow tiles; with more, the library wins. Which, `choice` says. Where a faster way
of the library is known, it is taken instead: see `measured`. Results may depend, in their last bits, on the number
of rows, and on what was measured at this start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trine.kernels.installed import missing

from .base import FLOATS, Behind, Want
from .choice import Burst, Choice, Shape
from .measured import measured
from .tiles import Tiles


class Vendor:
    """torch's linear, with Triton for few rows, and measured ways. `why`: there are none of these because."""

    name = "vendor"
    order = 20

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.weights not in FLOATS:
            return f"is for float weights, not {want.weights}"
        if want.device not in ("cuda", "rocm"):
            return f"is for GPUs, not {want.device}"
        return "its sums depend on the number of rows" if want.invariant else None

    def __init__(self, want: Want) -> None:
        self.tiles = Tiles(want) if missing("triton") is None else None
        self.choice = Choice(want)
        self.mixed = _mixes(getattr(torch, want.weights))
        self.measured, self.why = measured(want)

    def pack(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def multiply(self, x: Tensor, packed: Tensor, wide: bool = False) -> Tensor:
        if self.measured is not None:
            found = self.measured.multiply(x, packed, wide)
            if found is not None:
                return found
        return self._usual(x, packed, wide)

    def settle(self, rows: int) -> None:
        """Choose, once, how this number of rows is multiplied by the weights that were used so far; waits for the
        device. From then on every product of so many rows is done that way, recorded or not."""
        if self.measured is not None:
            self.measured.settle(rows, self._usual)

    def _usual(self, x: Tensor, packed: Tensor, wide: bool) -> Tensor:
        outs = packed.shape[0]
        if (how := self._how(x, outs, 1)) is not None:
            out = x.new_empty(len(x), outs, dtype=torch.float32 if wide else x.dtype)
            return self._launch(x, packed, out, how, None, Behind())
        if wide and x.dtype != torch.float32:
            if self.mixed:
                return torch.mm(x, packed.t(), out_dtype=torch.float32)
            return torch.mm(x, packed.t()).float()
        return F.linear(x, packed)

    def fuse(
        self, x: Tensor, packed: Tensor, norm: tuple[Tensor, float] | None, behind: Behind
    ) -> Tensor | None:
        """The product with the norm of x before it and a residual or a gated activation behind it, in one
        launch; None: not for these sizes, do it in separate steps. A residual is updated in place."""
        gates = 2 if behind.activation else 1
        outs = packed.shape[0] // gates
        how = self._how(x, outs, gates)
        if how is None or (norm is not None and (x.shape[0] > 1 or not self.choice.norms(*packed.shape))):
            return None
        out = behind.residual if behind.residual is not None else x.new_empty(x.shape[0], outs)
        return self._launch(x, packed, out, how, norm, behind)

    def _how(self, x: Tensor, outs: int, gates: int) -> Burst | Shape | None:
        """None: the library's."""
        rows, ins = x.shape
        if self.tiles is None or not rows:
            return None
        return self.choice.one(outs, ins, gates) if rows == 1 else self.choice.few(rows, outs * gates, ins)

    def _launch(
        self, x: Tensor, weight: Tensor, out: Tensor, how: Burst | Shape, norm: Any, behind: Behind
    ) -> Tensor:
        assert self.tiles is not None
        if isinstance(how, Burst):
            return self.tiles.row(x.contiguous(), weight, out, how, norm, behind)
        return self.tiles.product(x.contiguous(), weight, out, how, 1, behind)


def _mixes(dtype: torch.dtype) -> bool:
    """Whether torch multiplies these to float32 on the device that tensors are made on."""
    try:
        x = torch.zeros(16, 16, dtype=dtype)
        torch.mm(x, x, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


PLUGIN = Vendor
