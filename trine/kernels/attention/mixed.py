"""A backend of two: rows of one token go through the radix tree, all others to a library.

A library's kernel is asked for what it does best, long prompts; a step of rows of one token never meets it, so
that such steps are recorded as they are, nor does one of `short` rows, whose attention costs less than the call. This knows no library: a backend says how it prepares rows and attends.

Libraries may touch values behind a window or a row's end with a weight of 0, and 0 times NaN is NaN: pages
that no query of a row sees are replaced by one that is seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.core.types import Share
from trine.registry import get

from .base import Limits, Step, Store, Want


class Rows(NamedTuple):
    """Those of several tokens; indices are int32."""

    starts: Tensor  # [rows + 1]  where each begins in their tokens
    lengths: Tensor  # [rows]     positions
    pages: Tensor  # [rows, pages that any row has]
    count: int  # tokens of any row, at most


class Planned(NamedTuple):
    """Of one step."""

    singles: (
        Step | None
    )  # what the tree attends to, with its own plan: rows of one token, or all; None: nothing
    rows: Any  # what the library needs of all others; None: there are none


class Mixed:
    """What such backends have in common."""

    want: Want
    short = 1024  # positions of a step's longest row up to which the tree takes all of them

    def __init__(
        self, want: Want, store: Store, platform: Any, group: int = 0, limits: Limits | None = None
    ) -> None:
        self.want, self.store, self.group = want, store, group
        self.tree = get("kernels.attention", "triton")(want, store, platform, group, limits)
        self.scale = want.head_dim**-0.5 if want.scale is None else want.scale

    @property
    def may_share(self) -> bool:
        return self.tree.may_share

    @property
    def shares_now(self) -> bool:
        return self.tree.shares_now

    @shares_now.setter
    def shares_now(self, value: bool) -> None:
        self.tree.shares_now = value

    def prepare(self, rows: Rows) -> Any:
        """Once a step that has such rows."""
        raise NotImplementedError

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Any) -> Tensor:
        """q [tokens, heads, head_dim] -> the same; `rows` is what `prepare` made."""
        raise NotImplementedError

    def share(self, shares: list[Share]) -> None:
        self.tree.share(shares)

    def plan(self, step: Step) -> Planned:
        n = step.singles
        if n == len(step.lengths) or step.bound.length <= self.short:
            return Planned(self._singles(step), None)
        alone = step._replace(starts=step.starts[: n + 1], lengths=step.lengths[:n], slots=step.slots[:n])
        width = -(-step.bound.length // self.want.page_size)
        starts, lengths = (step.starts[n:] - n).int(), step.lengths[n:].int()
        pages = step.pages[self.group][:, :width].index_select(0, step.slots[n:]).int()
        rows = Rows(starts, lengths, self._seen(pages, starts, lengths), step.bound.count)
        return Planned(self._singles(alone) if n else None, self.prepare(rows))

    def _singles(self, step: Step) -> Step:
        return step._replace(attention=[*[None] * self.group, self.tree.plan(step)])

    def _seen(self, pages: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """Entries behind a row's end become its last, those behind its window the first that it sees."""
        size, index = self.want.page_size, torch.arange(pages.shape[1], device=pages.device)
        last = (lengths - 1) // size
        pages = torch.where(index > last[:, None], pages.gather(1, last[:, None].long()), pages)
        if not self.want.window:
            return pages
        first = lengths - starts.diff() - self.want.window + 1  # position that the first query sees first
        first = first.clamp(min=0) // size
        return torch.where(index < first[:, None], pages.gather(1, first[:, None].long()), pages)

    def run(self, q: Tensor, layer: int, step: Step) -> Tensor:
        singles, rows = step.attention[self.group]
        q = q.view(q.shape[0], self.want.heads, -1)
        if rows is None:
            return self.tree.run(q, layer, singles)
        n = 0 if singles is None else singles.singles
        found = self.attend(q[n:], *self.store.layer(layer), rows).flatten(1)
        return torch.cat([self.tree.run(q[:n], layer, singles), found]) if n else found
