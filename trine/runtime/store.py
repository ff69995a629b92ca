"""Where KV lies: the tensors behind the page numbers.

Layers of one group share page ids, so they share one tensor and a copy of a page's front is
one assignment for all of them. The store does not know whose a page is, or what is valid in it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trine.core.types import Copy, Group
from trine.errors import Unsupported


class KV(Protocol):
    """What a layer keeps of each position."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Store:
    """KV of every layer, by group, in pages.

    A CPU's memory is not cleared: pages cost real memory when they are first written, and readers never look at
    positions that were not written. A GPU's is, since kernels that copy whole pages multiply what they must not
    see by 0."""

    def __init__(
        self,
        layers: list[KV],
        layer_groups: list[int],
        groups: list[Group],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups: list[Tensor] = []  # by group: [2, layers, pages, page_size, kv_heads, head_dim]
        self.places: list[tuple[int, int]] = []  # by layer: its group, and its place in it
        counts = [0] * len(groups)
        for group in layer_groups:
            self.places.append((group, counts[group]))
            counts[group] += 1
        for i, group in enumerate(groups):
            shapes = {
                (layer.kv_heads, layer.head_dim)
                for layer, g in zip(layers, layer_groups, strict=True)
                if g == i
            }
            if len(shapes) != 1:
                raise Unsupported(f"layers of KV group {i} must keep one shape, found {sorted(shapes)}")
            shape = (2, counts[i], group.pages, page_size, *shapes.pop())
            make = torch.empty if device.type == "cpu" else torch.zeros
            self.groups.append(make(shape, dtype=dtype, device=device))

    @property
    def bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """k and v of one layer, each [pages, page_size, kv_heads, head_dim]."""
        group, place = self.places[layer]
        return self.groups[group][0, place], self.groups[group][1, place]

    def copy(self, copies: list[Copy]) -> None:
        """Pages, in all layers of their group, in order: whole ones, since what lies where in a page is a backend's
        business, and nobody has written behind the front that is meant."""
        for copy in copies:
            kv = self.groups[copy.group]
            kv[:, :, copy.target] = kv[:, :, copy.source]
