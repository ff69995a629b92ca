"""Weights in blocks of 32 as a GGUF file has them, and as the native products want them. It knows no layers."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from . import library
from .library import GROUP

# ggml's numbers of kinds -> bytes of a block of 32, and bits that a weight takes.
KINDS = {2: (18, 4), 3: (20, 4), 8: (34, 8)}  # Q4_0, Q4_1, Q8_0
NAMES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
ROWS = 4096  # that are float32 at a time: a whole vocabulary would be large


class Blocks:
    """Rows of a matrix, as they are stored: `kind` of KINDS, `data` [rows, bytes] uint8."""

    def __init__(self, kind: int, data: Tensor) -> None:
        self.kind, self.data = kind, data

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.data.shape[1] // KINDS[self.kind][0] * GROUP

    def __getitem__(self, rows: slice) -> Blocks:
        return Blocks(self.kind, self.data[rows])

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
        self.data = torch.zeros(library.load().trine_bytes(outs, ins, bits), dtype=torch.uint8)
        self.struct = library.Weights(self.data.data_ptr(), outs, ins, bits)

    def put(self, start: int, rows: Blocks | Tensor) -> None:
        """Rows from output `start` on. What is not stored in so many bits is rounded to 8."""
        if isinstance(rows, Blocks) and KINDS[rows.kind][1] == self.struct.bits:
            self._pack(rows.kind, start, rows.data)
            return
        assert self.struct.bits == 8
        for i in range(0, rows.shape[0], ROWS):
            self._pack(FLOATS[torch.float32], start + i, rows[i : i + ROWS].float().contiguous())

    def _pack(self, kind: int, start: int, data: Tensor) -> None:
        size = data.stride(0) * data.element_size()
        library.load().trine_pack(
            kind,
            data.data_ptr(),
            size,
            len(data),
            self.data.data_ptr(),
            start,
            self.struct.ins,
            self.struct.bits,
        )

    def float(self) -> Tensor:
        """[outs, ins]."""
        out = torch.empty(self.struct.outs, self.struct.ins)
        library.load().trine_unpack(ctypes.byref(self.struct), out.data_ptr())
        return out


def pack(parts: list[tuple[int, Blocks | Tensor]], outs: int, ins: int) -> Packed:
    """Parts by their first output; 4 bits if all of them have 4."""
    small = all(isinstance(rows, Blocks) and KINDS[rows.kind][1] == 4 for _, rows in parts)
    packed = Packed(outs, ins, 4 if small else 8)
    for start, rows in parts:
        packed.put(start, rows)
    return packed


def not_blocks(weights: str) -> str | None:
    """What native kernels say to other weights."""
    return None if weights == "blocks" else f"goes with weights in blocks, not {weights or 'others'}"
