"""Token ids to vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .part import Part


class Embedding(Part):
    """A table of vectors, looked up by token.

    With rounded weights the table keeps the dtype it has in the checkpoint: look-ups cost nothing, so there is
    no reason to lose precision here."""

    def __init__(self, vocab: int, size: int, dtype: str, activations: torch.dtype) -> None:
        super().__init__()
        self.vocab, self.size, self.activations = vocab, size, activations
        self.takes_blocks = dtype == "blocks"
        rounded = dtype in ("int8", "blocks")
        self.dtypes = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16} if rounded else {}
        self.default = torch.float32 if rounded else getattr(torch, dtype)
        self.weight: Any = torch.empty(0, size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids).to(self.activations)

    def wants(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.vocab, self.size)}

    def put(self, name: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            self.weight = tensor  # rows as the file has them
            return
        kept = tensor.to(self.weight.device, self.dtypes.get(tensor.dtype, self.default))
        # A checkpoint may hand out a view of its file, which must not outlive it.
        self.weight = kept.clone() if kept.data_ptr() == tensor.data_ptr() else kept
