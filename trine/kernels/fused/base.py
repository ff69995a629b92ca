"""The contract of the small operations around the products: norms, rotation, gated activation, KV's place.

Each works on rows, and a row's result must not depend, in any bit, on the rows beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from torch import Tensor


class Want(Struct, frozen=True):
    """What a model asks of them."""

    dtype: str = "float32"  # of activations
    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA device
    weights: str = ""  # that the model multiplies by: gemm.base.Want


class Heads(NamedTuple):
    """How one layer's queries, keys and values lie side by side."""

    queries: int
    keys: int  # and as many of values
    dim: int


class HeadNorm(NamedTuple):
    """A norm of every query and key head."""

    weight: Tensor  # [queries + keys, dim]
    eps: float


class Places(NamedTuple):
    """Where a layer's keys and values of this step go."""

    write: Tensor  # [tokens]  page * page_size + offset
    keys: Tensor  # [pages, page_size, kv_heads, dim], of the store's own dtype
    values: Tensor  # like keys


class Fused(Protocol):
    """One object serves all layers."""

    name: str
    order: int

    @classmethod
    def cannot(cls, want: Want) -> str | None: ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square over the last dimension, times a weight that fits the last ones."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual). Both arguments are given away."""
        ...

    def turn(self, table: Tensor, positions: Tensor) -> Any:
        """What `place` needs of a step's positions; once a step, the same for all layers that turn alike.

        table [positions there are, 2 * dim]: cosines, twice, then sines, the first half of them negative."""
        ...

    def place(self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, turn: Any, places: Places) -> Tensor:
        """Norm and turn queries and keys, put keys and values where they belong -> queries [tokens, heads, dim].

        qkv [tokens, (queries + 2 * keys) * dim] is given away. A turn is in the planes (i, i + dim / 2). On a GPU
        values of 16 bits are stored finite, whatever they were: attention may multiply what is unseen by 0."""
        ...

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """x [tokens, 2 n] is gate and up side by side -> activation(gate) * up."""
        ...
