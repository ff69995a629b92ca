"""The pages of one group: which are free, and which the tree could give back.

Ids only: what is in a page, and who holds it, others know. Page 0 is never given out.
"""

from __future__ import annotations

from array import array

from trine.core.types import Group


class PagePool:
    """Free page ids of one group. `room` is what can be had: free ones, and idle ones by eviction."""

    __slots__ = ("free", "idle", "refs", "total", "window")

    def __init__(self, group: Group, page_size: int) -> None:
        self.total = group.pages - 1
        self.window = -(-group.window // page_size)  # pages that must be kept behind the last full one
        self.free = list(range(self.total, 0, -1))
        self.idle = 0  # pages of the tree that no sequence holds
        # Of a window group, by page of the tree: how many sequences have it in their table. The
        # tree's locks are by node and would keep what is behind the window.
        self.refs = array("i", bytes(4 * group.pages)) if self.window else array("i")

    @property
    def room(self) -> int:
        return len(self.free) + self.idle
