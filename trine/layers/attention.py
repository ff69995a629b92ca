"""Attention as a model sees it: what one product made of the hidden state in, a mix of values out.

Queries and keys are normed and turned on the way, and keys and values put in the store. Which backend attends,
and where KV lies, is the backend's business.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trine.kernels.attention.base import Attention as Backend
from trine.kernels.attention.base import Step
from trine.kernels.fused import base
from trine.kernels.fused.base import Fused, Heads, Places

from .norm import HeadNorm


class Attention(nn.Module):
    """One layer's."""

    def __init__(
        self, layer: int, heads: Heads, norm: HeadNorm | None, fused: Fused, backend: Backend | None
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.norm, self.fused, self.backend = layer, heads, norm, fused, backend

    def forward(self, qkv: Tensor, turn: Any, step: Step) -> Tensor:
        """qkv [tokens, queries, keys and values side by side]; `turn` is Rope's -> [tokens, heads * head_dim]."""
        backend = self.backend
        assert backend is not None, "the Maker was given no attention backends"
        places = Places(step.write[backend.group], *backend.store.layer(self.layer))
        norm = base.HeadNorm(self.norm.weight, self.norm.eps) if self.norm else None
        q = self.fused.place(qkv, self.heads, norm, turn, places)
        return backend.run(q, self.layer, step)
