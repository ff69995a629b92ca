"""Attention as a model sees it: queries, keys and values in, a mix of values out.

Which backend does it, and where KV lies, is the backend's business.
"""

from __future__ import annotations

from torch import Tensor, nn

from trine.kernels.attention.base import Attention as Backend
from trine.kernels.attention.base import Step


class Attention(nn.Module):
    """One layer's."""

    def __init__(self, layer: int, heads: int, kv_heads: int, head_dim: int, backend: Backend | None) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Heads are the last dimension but one, or still flat -> [tokens, heads * head_dim]."""
        assert self.backend is not None, "the Maker was given no attention backends"
        return self.backend.run(
            q.view(-1, self.heads, self.head_dim),
            k.view(-1, self.kv_heads, self.head_dim),
            v.view(-1, self.kv_heads, self.head_dim),
            self.layer,
            step,
        )
