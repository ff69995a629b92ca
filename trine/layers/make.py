"""Maker: what a model is made with. It carries dtype, chosen products and backends, mesh: all that would else
be global state. A model asks it for parts by their sizes and knows no more.

    make = Maker("int8", "pair", attention=[backend for each layer], max_len=8192)
    model = family("llama").Model(config, make)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trine.errors import Unsupported
from trine.kernels.attention.base import Attention as Backend
from trine.kernels.fused import base as fused_base
from trine.kernels.fused.base import Heads
from trine.kernels.gemm.base import Want
from trine.parallel.mesh import Mesh
from trine.platforms.base import Facts
from trine.registry import get

from .attention import Attention
from .embedding import Embedding
from .gated_mlp import GatedMLP
from .linear import Linear
from .norm import HeadNorm, Norm
from .rope import Rope

# How weights are stored -> the file of trine/quant that does it.
QUANTS = {"int8": "int8", "float32": "none", "bfloat16": "none", "float16": "none", "blocks": "blocks"}


class Maker:
    """Makes parts. One for each model."""

    def __init__(
        self,
        dtype: str,
        product: str,
        mesh: Mesh | None = None,
        attention: Sequence[Backend] = (),
        *,
        max_len: int = 4096,
        invariant: bool = True,
        fused: str = "reference",
        activations: str = "float32",
        facts: Facts | None = None,
    ) -> None:
        if dtype not in QUANTS:
            raise Unsupported(f"weights cannot be kept as {dtype!r}; there are: {', '.join(QUANTS)}")
        self.dtype, self.max_len, self.activations = dtype, max_len, getattr(torch, activations)
        self.mesh = mesh or Mesh()
        self.backends = attention  # by layer
        self.ropes: dict[tuple[Any, ...], Rope] = {}
        kind, cores = (facts.kind, facts.cores) if facts else ("cpu", 0)
        capability = facts.capability if facts else (0, 0)
        self.fused = get("kernels.fused", fused)(fused_base.Want(activations, kind, capability))
        want = Want(dtype, invariant, kind, capability=capability, cores=cores)
        self.product = get("kernels.gemm", product)(want)
        self.quant = get("quant", QUANTS[dtype])(self.product, dtype)

    def norm(self, size: int, eps: float) -> Norm:
        return Norm(size, eps, self.fused)

    def head_norm(self, heads: Sequence[int], head_dim: int, eps: float) -> HeadNorm:
        """One norm for each of several kinds of heads that lie side by side."""
        return HeadNorm(heads, head_dim, eps)

    def linear(
        self,
        ins: int,
        outs: Sequence[Sequence[int]] | int,
        split: str | None = None,
        bias: bool = False,
        wide: bool = False,
    ) -> Linear:
        """`outs`: groups of sizes; each size is a tensor of its own in a checkpoint, each group is a result."""
        groups = [[outs]] if isinstance(outs, int) else outs
        return Linear(ins, groups, split, bias, self.quant, self.mesh, wide)

    def embedding(self, vocab: int, size: int) -> Embedding:
        return Embedding(vocab, size, self.dtype, self.activations)

    def attention(
        self, layer: int, heads: int, kv_heads: int, head_dim: int, norm: HeadNorm | None = None
    ) -> Attention:
        backend = self.backends[layer] if self.backends else None
        return Attention(layer, Heads(heads, kv_heads, head_dim), norm, self.fused, backend)

    def rope(self, head_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> Rope:
        """Layers that turn alike share one table."""
        key = (head_dim, theta, repr(scaling))
        if key not in self.ropes:
            self.ropes[key] = Rope(head_dim, theta, scaling or {}, self.max_len, self.fused)
        return self.ropes[key]

    def gated_mlp(self, size: int, inner: int, activation: str, bias: bool = False) -> GatedMLP:
        up = self.linear(size, [[inner, inner]], "out", bias)
        return GatedMLP(up, self.linear(inner, size, "in", bias), activation)
