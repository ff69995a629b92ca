"""The contract of attention over paged KV, in shapes: what a step shows, what a layer wants.

A backend is stateless but for buffers it allocates itself. It serves one group of layers, whose
KV lies in one pool with one page table. It does not know of sequences, slots' tenants or models.

Of a row that computes `count` tokens: its last query sits at position `lengths[row] - 1`, its
first at `lengths[row] - count`; a query at position p sees the positions 0..p (with a window w:
p - w + 1..p). A position lies in the store at `pages[slots[row], p // page_size] * page_size +
p % page_size`. Entries of `pages` behind a row's last page, and behind its window, may be anything.

A step of singles only may be captured in a graph and replayed with other slots: nothing of it may be
read on the host then. Rows that only fill such a step up have slot 0 and a length of 0 or 1; nobody reads
what becomes of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from torch import Tensor

from trine.core.types import Share


class Bounds(NamedTuple):
    """Upper bounds that the host knows without asking the device: they size launches."""

    tokens: int  # in the step
    count: int  # tokens of any row
    length: int  # positions that any row sees


class Step(NamedTuple):
    """What the model sees of one batch. All rows lie one behind the other. Indices are int64 on a CPU,
    int32 elsewhere."""

    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    write: list[Tensor]  # by group: [tokens]     where each token's KV goes: page * page_size + offset
    starts: Tensor  # [rows + 1]                  where each row begins in the tokens
    lengths: Tensor  # [rows]                     positions visible to the row's last query
    pages: list[Tensor]  # by group: [slots, pages]  the page table of every slot, also of those not here
    wanted: Tensor | None  # [samples]            which tokens want logits; None: all
    slots: Tensor  # [rows]
    singles: int  # rows of exactly one token: they come first; all others have more
    attention: list[Any]  # by group: what the backend's own `plan` made of this step
    bound: Bounds


class Limits(NamedTuple):
    """The most that a step may ever have: backends size their buffers by it."""

    rows: int
    slots: int
    length: int  # positions of a row
    tokens: int  # in a step


class Want(Struct, frozen=True):
    """What a group of layers asks of its backend."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int  # positions
    dtype: str = "float32"  # of q, k, v and the result
    kv_dtype: str = "float32"  # of the store
    scale: float | None = None  # None: head_dim ** -0.5
    window: int = 0  # positions a query sees, its own included; 0: all
    softcap: float = 0.0  # 0: none
    sinks: bool = False
    invariant: bool = True  # a token's result must not depend, in any bit, on what shares the step
    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)  # of a GPU: Facts.capability
    weights: str = ""  # that the model multiplies by: gemm.base.Want


class Store(Protocol):
    """Where KV lies. Values outside what was written may be anything, NaN included."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """k and v of one layer, each [pages, page_size, kv_heads, head_dim]."""
        ...


class Attention(Protocol):
    """A way to attend over paged KV: one object for each group of layers."""

    name: str
    order: int  # tried from low to high; the reference is last
    group: int  # whose KV it attends over
    store: Store
    may_share: bool  # whether it makes anything of shared runs
    shares_now: bool  # whether they are in force: recorded steps are kept apart by it

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        """Why this backend cannot serve `want`; None if it can. Imports vendor code only here."""
        ...

    def __init__(
        self, want: Want, store: Store, platform: Any, group: int = 0, limits: Limits | None = None
    ) -> None: ...

    def share(self, shares: list[Share]) -> None:
        """Runs of pages that slots have in common, from the next step on, until the next call."""
        ...

    def plan(self, step: Step) -> Any:
        """Once a step, before the model runs; the runner keeps it in `step.attention[group]`."""
        ...

    def run(self, q: Tensor, layer: int, step: Step) -> Tensor:
        """Attend; the store has the KV of all tokens of the step already.

        q [tokens, heads, head_dim] -> [tokens, heads * head_dim]."""
        ...
