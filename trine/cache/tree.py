"""A compressed radix tree whose edges are runs of whole KV pages, in one or several groups.

A child is found by the bytes of its first page, so a step down is one look-up and one memory
comparison. Time is a counter. Nodes that can give up pages wait in a heap with lazy removal, so
eviction never walks the tree. In a window group single pages of a node may be missing (0). A tail
is a leaf of one page that is not full: nobody holds it, and only its front is ever copied. No child
begins with another one, so a tail's only rival for the same tokens is its neighbour in `order`.
The tree knows pages and tokens as bytes; of sequences it sees only that they lock nodes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from .pages import PagePool

TOKEN = 4  # bytes of a token id
TAILS = 8  # below one node, at most


class Node:
    """A run of pages below `parent`. The root of a space has none, and no parent."""

    __slots__ = (
        "children", "count", "end", "key", "listed", "locks", "order", "pages", "parent", "tails", "used"
    )  # fmt: skip

    def __init__(self, key: bytes, pages: list[list[int]], parent: Node | None, count: int) -> None:
        self.key = key  # of a root: the name of its space
        self.pages = pages  # by group
        self.parent = parent
        self.count = count
        self.end: int = count + (parent.end if parent else 0)  # pages from the root to its end
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []  # keys of `children`, sorted: neighbours share the longest front
        self.tails: list[Node] = []  # those of its children
        self.locks = 0  # of sequences that hold it, or a node below it
        self.used = 0
        self.listed = 0  # bits: in which heaps it is

    @property
    def start(self) -> int:
        return self.end - self.count


class Tree:
    """`pools`: where evicted pages go, by group."""

    def __init__(self, page_size: int, pools: list[PagePool]) -> None:
        self.step = page_size * TOKEN
        self.pools = pools
        self.full = [p for p in pools if not p.window]
        self.windows = [(g, p) for g, p in enumerate(pools) if p.window]
        self.roots: dict[str, Node] = {}
        self.clock = 0
        self.ties = 0
        self.size = 0  # nodes, roots apart
        # By kind: [0] leaves, by last use; [1 + group] nodes with idle pages of a window group.
        self.heaps: list[list[tuple[int, int, int, Node]]] = [[] for _ in range(len(pools) + 1)]

    # ---- reading ----------------------------------------------------------------------------
    def root(self, space: str) -> Node:
        """Where a space begins. One that nobody holds and that is empty is forgotten again."""
        if (root := self.roots.get(space)) is None:
            name = space.encode("utf-8", "surrogatepass")
            root = self.roots[space] = Node(name, [[] for _ in self.pools], None, 0)
        return root

    def match(self, root: Node, key: bytes, most: int) -> tuple[Node, int]:
        """The longest front of `key`, at most `most` pages, that every group can serve.

        Gives the node that it ends in and its length in pages; changes nothing."""
        node, count = self._find(root, key)
        count = min(count, most)
        if self.windows:
            count = self._served(node, count)
        while node.parent is not None and node.end - node.count >= count:
            node = node.parent
        return node, count

    def near(self, node: Node, key: bytes) -> tuple[Node | None, int]:
        """Below `node`: the child whose first page shares the longest front with `key`, in tokens."""
        best, most = None, 0
        at = bisect_left(node.order, key)
        for first in node.order[max(0, at - 1) : at + 1]:
            if (shared := _shared(first, key)) > most:
                child = node.children[first]
                if all(child.pages[g][0] for g, _ in self.windows):
                    best, most = child, shared
        return best, most

    def path(self, node: Node, group: int, start: int = 0) -> list[int]:
        """Pages of one group from index `start` to the end of `node`."""
        runs: list[list[int]] = []
        while node.end > start:
            begin = node.end - node.count
            runs.append(node.pages[group] if begin >= start else node.pages[group][start - begin :])
            assert node.parent is not None
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def nodes(self) -> Iterator[Node]:
        """All of them, roots too: for checks and for the curious."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    # ---- holding ----------------------------------------------------------------------------
    def lock(self, node: Node, above: Node | None = None) -> None:
        """Hold `node` and all above it, up to and without `above` (which is held already)."""
        self.clock += 1
        at: Node | None = node
        while at is not above and at is not None:
            if at.locks == 0:
                for pool in self.full:
                    pool.idle -= at.count
            at.locks += 1
            at.used = self.clock
            at = at.parent

    def unlock(self, node: Node) -> None:
        self.clock += 1
        at: Node | None = node
        while at is not None:
            above = at.parent
            at.locks -= 1
            at.used = self.clock
            if at.locks == 0:
                for pool in self.full:
                    pool.idle += at.count
                self._leaf(at)
            at = above

    def idle(self, node: Node, group: int) -> None:
        """Pages of a window group in this node became idle: they can be evicted by themselves."""
        self._list(node, 1 + group)

    # ---- writing ----------------------------------------------------------------------------
    def cut(self, node: Node, count: int) -> Node:
        """A node that ends after `count` pages in all; `count` lies inside `node` or at its end."""
        if count == node.end:
            return node
        size = count - node.start
        edge = size * self.step
        assert node.parent is not None
        top = Node(node.key[:edge], [p[:size] for p in node.pages], node.parent, size)
        top.locks, top.used = node.locks, node.used
        node.parent.children[top.key[: self.step]] = top
        node.key, node.pages = node.key[edge:], [p[size:] for p in node.pages]
        node.count -= size
        node.parent = top
        self.size += 1
        self._adopt(top, node)
        for group, _ in self.windows:
            if node.listed >> (1 + group) & 1:
                self._list(top, 1 + group)
        return top

    def insert(self, node: Node, key: bytes, tables: list[list[int]]) -> tuple[Node, list[Node]]:
        """Add the run `key`, with its pages by group, below `node`, which the caller holds.

        Gives the node it ends with, and the nodes that were there already: their pages are not
        changed. A leaf that nobody else holds just grows."""
        had: list[Node] = []
        at = 0  # bytes of key that the tree has
        while child := node.children.get(key[at : at + self.step]):
            pages = len(child.key) // self.step
            if not key.startswith(child.key, at):
                pages = self._common(child.key, key, at)
            node = self.cut(child, child.start + pages)
            had.append(node)
            at += len(node.key)
        if at < len(key):
            self.clock += 1
            rest = [table[at // self.step :] for table in tables]
            self._outgrow(node, key[at : at + self.step])
            # A node of `had` must not grow: the caller takes all its pages for duplicates.
            if not had and node.parent is not None and not node.children and node.locks == 1:
                self._grow(node, key[at:], rest)
            else:
                node = self._add(node, key[at:], rest)
        return node, had

    def keep(self, node: Node, key: bytes, pages: list[list[int]]) -> bool:
        """Add a tail below `node`, which the caller holds.

        False: a child begins with all of `key`, and the pages are not taken."""
        self.clock += 1
        at = bisect_left(node.order, key)
        if at < len(node.order) and node.order[at].startswith(key):
            node.children[node.order[at]].used = self.clock
            return False
        self._outgrow(node, key)
        if len(node.tails) == TAILS:
            self._shorten(min(node.tails, key=lambda tail: tail.used), 1)
        tail = self._add(node, key, pages)
        for group, pool in self.windows:
            pool.idle += 1
            self.idle(tail, group)
        return True

    def _outgrow(self, node: Node, key: bytes) -> None:
        """Free the tail below `node` that `key`, which is not there, begins with."""
        at = bisect_left(node.order, key)
        if at and key.startswith(node.order[at - 1]):
            self._shorten(node.children[node.order[at - 1]], 1)

    def _add(self, parent: Node, key: bytes, pages: list[list[int]]) -> Node:
        node = Node(key, pages, parent, -(-len(key) // self.step))
        node.used = self.clock
        self._adopt(parent, node)
        self.size += 1
        for pool in self.full:
            pool.idle += node.count
        self._leaf(node)
        return node

    def _grow(self, node: Node, key: bytes, pages: list[list[int]]) -> None:
        count = len(key) // self.step
        node.key += key
        for mine, more in zip(node.pages, pages, strict=True):
            mine += more
        node.count += count
        node.end += count
        node.used = self.clock

    # ---- giving up pages --------------------------------------------------------------------
    def evict(self, group: int, want: int) -> None:
        """Give `want` pages of a group back to its pool, those used least recently first."""
        if self.pools[group].window:
            self._evict_window(group, want)
            return
        while want > 0 and (node := self._oldest(0)):
            if node.locks or node.children or node.parent is None:
                continue
            count = min(want, node.count)
            self._drop(node, count)
            want -= count

    def flush(self) -> None:
        """Give up all that nobody holds."""
        for group, pool in enumerate(self.pools):
            if pool.idle:
                self.evict(group, pool.idle)

    def _evict_window(self, group: int, want: int) -> None:
        pool = self.pools[group]
        while want > 0 and (node := self._oldest(1 + group)):
            if node.parent is None:
                continue
            pages = node.pages[group]
            leaf = not node.children and not node.locks
            # A leaf is of use only with the window that its end needs: that goes last, with the leaf.
            for index in range(node.count - pool.window if leaf else node.count):
                page = pages[index]
                if want and page and not pool.refs[page]:
                    pages[index] = 0
                    pool.free.append(page)
                    pool.idle -= 1
                    want -= 1
            if leaf and want:
                end = 0
                while want and end < node.count:
                    end += 1
                    want -= pages[-end] != 0
                self._drop(node, end)
            if any(p and not pool.refs[p] for p in pages):
                self._list(node, 1 + group)

    def _drop(self, leaf: Node, count: int) -> None:
        """Free the last `count` pages of a leaf that nobody holds, in every group."""
        parent = self._shorten(leaf, count)
        self._leaf(parent or leaf)

    def _shorten(self, leaf: Node, count: int) -> Node | None:
        """Gives the parent if nothing was left of the leaf, so that it is gone."""
        keep = leaf.count - count
        for pages, pool in zip(leaf.pages, self.pools, strict=True):
            gone = [p for p in pages[keep:] if p]
            pool.free += gone
            pool.idle -= len(gone)
            del pages[keep:]
        leaf.count = keep
        leaf.end -= count
        if keep:
            leaf.key = leaf.key[: keep * self.step]
            return None
        parent, first = leaf.parent, leaf.key[: self.step]
        assert parent is not None
        del parent.children[first]
        del parent.order[bisect_left(parent.order, first)]
        if len(first) < self.step:
            parent.tails.remove(leaf)
        leaf.parent = None
        self.size -= 1
        return parent

    def _leaf(self, node: Node) -> None:
        """If nobody holds it and it has no children, it can be evicted; an empty root is forgotten."""
        at: Node | None = node
        while at is not None and not at.children and not at.locks:
            if at.parent is None:
                self.roots.pop(at.key.decode("utf-8", "surrogatepass"), None)
                return
            if self.full:
                self._list(at, 0)
                return
            # Without full groups an end that no group keeps is of no use, and nothing evicts it.
            empty = 0
            while empty < at.count and not any(pages[-1 - empty] for pages in at.pages):
                empty += 1
            at = self._shorten(at, empty) if empty else None

    # ---- heaps ------------------------------------------------------------------------------
    def _list(self, node: Node, kind: int) -> None:
        if node.listed >> kind & 1:
            return
        node.listed |= 1 << kind
        self.ties += 1
        heap = self.heaps[kind]
        if len(heap) > 2 * self.size + 64:  # mostly nodes that are gone
            heap[:] = [entry for entry in heap if entry[3].parent is not None]
            heapq.heapify(heap)
        # Of nodes used at the same time, a window group gives up the upper ones first: the window
        # of the lower end does not need them.
        heapq.heappush(heap, (node.used, node.end if kind else 0, self.ties, node))

    def _oldest(self, kind: int) -> Node | None:
        """Take the node used least recently out of a heap; it may be gone, held, or a parent now."""
        heap = self.heaps[kind]
        while heap:
            used, _, _, node = heapq.heappop(heap)
            node.listed &= ~(1 << kind)
            if used == node.used or node.parent is None:
                return node
            self._list(node, kind)
        return None

    # ---- inside -----------------------------------------------------------------------------
    def _find(self, root: Node, key: bytes) -> tuple[Node, int]:
        """The deepest node that `key` enters, and how many pages it matches in all."""
        node, at, step = root, 0, self.step
        while child := node.children.get(key[at : at + step]):
            if not key.startswith(child.key, at):
                return child, at // step + self._common(child.key, key, at)
            node, at = child, at + len(child.key)
        return node, at // step

    def _common(self, key: bytes, query: bytes, at: int) -> int:
        """How many pages of `key` begin `query[at:]`; the first one does."""
        step = self.step
        low, high = 1, min(len(key), len(query) - at) // step
        while low < high:
            middle = (low + high + 1) // 2
            if key[low * step : middle * step] == query[at + low * step : at + middle * step]:
                low = middle
            else:
                high = middle - 1
        return low

    def _served(self, node: Node, count: int) -> int:
        """The longest match of at most `count` pages whose window every window group has."""
        while count:
            while node.parent is not None and node.end - node.count >= count:
                node = node.parent
            gaps = [self._gap(node, g, max(0, count - pool.window), count) for g, pool in self.windows]
            if max(gaps) < 0:
                break
            count = min(gap for gap in gaps if gap >= 0)
        return count

    def _gap(self, node: Node, group: int, low: int, high: int) -> int:
        """The last missing page of a window group in [low, high) on the way to `node`; -1: none."""
        at: Node | None = node
        while at is not None and at.end > low:
            start, pages = at.start, at.pages[group]
            for index in range(min(high, at.end) - 1, max(low, start) - 1, -1):
                if not pages[index - start]:
                    return index
            at = at.parent
        return -1

    def _adopt(self, parent: Node, child: Node) -> None:
        first = child.key[: self.step]
        if first not in parent.children:
            insort(parent.order, first)
        parent.children[first] = child
        if len(first) < self.step:
            parent.tails.append(child)


def _shared(a: bytes, b: bytes) -> int:
    """Length of the common front of two runs of token ids, in tokens."""
    size = min(len(a), len(b))
    different = int.from_bytes(a[:size]) ^ int.from_bytes(b[:size])
    return (size - (different.bit_length() + 7) // 8) // TOKEN
