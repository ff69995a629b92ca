"""Weights in blocks of 32 as a GGUF file has them, and as the native products want them. It knows no layers."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library
from .library import GROUP

# ggml's numbers of kinds -> bytes of a block of 32, and bits that a weight takes.
KINDS = {2: (18, 4), 3: (20, 4), 8: (34, 8)}  # Q4_0, Q4_1, Q8_0
NAMES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
LANES = 8
SIZES = {4: 160, 8: 272}  # bytes of a group of LANES outputs


class Blocks(NamedTuple):
    """Rows of a matrix, as they are stored."""

    kind: int  # of KINDS
    data: Tensor  # [rows, bytes] uint8

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.data.shape[1] // KINDS[self.kind][0] * GROUP

    def index_select(self, dim: int, ids: Any) -> Any:
        """Rows by their numbers, as of a tensor; recorded if `ids` is a symbol."""
        assert dim == 0
        return ids.tape.embed(self.data, self.shape[1], self.kind, ids)

    def float(self) -> Tensor:
        """The numbers."""
        packed = pack([(0, self)], *self.shape)
        return packed.float()


class Packed:
    """A weight [outs, ins] in groups, for products."""

    def __init__(self, outs: int, ins: int, bits: int) -> None:
        size = -(-outs // LANES) * (ins // GROUP) * SIZES[bits]
        self.data = torch.zeros(size, dtype=torch.uint8)
        self.struct = library.Weights(self.data.data_ptr(), -(-outs // LANES) * LANES, ins, bits, outs)

    def put(self, start: int, rows: Blocks | Tensor) -> None:
        """Rows from output `start` on."""
        kind, data = rows if isinstance(rows, Blocks) else (0, rows.float().contiguous())
        bits = self.struct.bits
        if bits != (KINDS[kind][1] if kind else 8):
            assert isinstance(rows, Blocks) and bits == 8
            kind, data = 0, rows.float()
        step = data.stride(0) * data.element_size()
        library.load().trine_pack(
            kind, data.data_ptr(), step, len(data), self.data.data_ptr(), start, self.struct.ins, bits
        )

    def float(self) -> Tensor:
        """[outs, ins]."""
        out = torch.empty(self.struct.used, self.struct.ins)
        library.load().trine_unpack(ctypes.byref(self.struct), out.data_ptr())
        return out


def pack(parts: list[tuple[int, Blocks | Tensor]], outs: int, ins: int) -> Packed:
    """Parts by their first output; 4 bits if all of them have 4."""
    small = all(isinstance(rows, Blocks) and KINDS[rows.kind][1] == 4 for _, rows in parts)
    packed = Packed(outs, ins, 4 if small else 8)
    for start, rows in parts:
        packed.put(start, rows)
    return packed
