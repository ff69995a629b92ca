"""The only door between the scheduler and the cache: admit, extend, publish, release, and a check.

It keeps each sequence's page tables, by group, and moves pages between pools, sequences and the
tree. Numbers only: what is in a page is the device's. It does not decide who runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trine.core.types import Copy, Group, Sequence, Share

from .check import check
from .pages import PagePool
from .shares import SHORTEST, shares
from .tree import TOKEN, Node, Tree

Change = tuple[int, int, list[int]]  # group, first index in the page table, page ids


class View(NamedTuple):
    """What StepStats tells of memory, summed over the groups."""

    pages: int  # in the pools
    held: int  # by sequences, each once
    cached: int  # in the tree and held by nobody
    reserved: int  # KV positions in held pages
    used: int  # of those, positions with KV, or whose KV is being computed


class Cache:
    """Pages of all groups, and the tree that shares them. `shortest`: tokens of a run in common that is
    told of."""

    def __init__(self, groups: list[Group], page_size: int, shortest: int = SHORTEST) -> None:
        self.size, self.shortest = page_size, -(-shortest // page_size)
        self.pools = [PagePool(group, page_size) for group in groups]
        self.windows = [(g, pool) for g, pool in enumerate(self.pools) if pool.window]
        self.tree = Tree(page_size, self.pools)
        # Pages that a sequence is about to compute: the node they come below, and their tokens.
        self.making: dict[tuple[Node, bytes], Sequence] = {}
        self.maker: dict[Sequence, tuple[Node, bytes]] = {}
        self.blocked: dict[Sequence, tuple[Node, bytes]] = {}  # who waits for such a page
        self.gains = 0  # grows when `room` may have grown other than by eviction
        self.bonds = 0  # grows when `shares` may have changed

    # ---- the verbs ----------------------------------------------------------------------
    def admit(self, seq: Sequence) -> list[Copy] | None:
        """Lock the longest cached front, and start the sequence after it; at least one token is left.

        The copies bring a match inside a page. None: a sibling is computing the next page just now,
        and the sequence holds nothing."""
        if (key := self.blocked.get(seq)) is not None and key in self.making:
            return None
        text, size = seq.tokens.tobytes(), self.size
        usable = len(seq.tokens) - 1
        root = self.tree.root(seq.request.space)
        node, count = self.tree.match(root, text, usable // size)
        begin = count * size * TOKEN
        next_page = text[begin : begin + size * TOKEN]
        if count == node.end and (node, next_page) in self.making and not self._has(node, next_page):
            self.blocked[seq] = node, next_page
            return None
        self.blocked.pop(seq, None)
        seq.node = self.tree.cut(node, count)
        self.tree.lock(seq.node)
        seq.shared, seq.planned = count, count * size
        seq.pages = [self._path(seq.node, group, count) for group in range(len(self.pools))]
        copies = self._inside(seq, text[begin : usable * TOKEN])
        seq.computed = seq.planned
        self.bonds += 1
        self._make(seq)
        return copies

    def fit(self, seq: Sequence, length: int, most: list[int] | None = None) -> int:
        """The greatest length, at most `length`, that `extend` could reach with `most` pages of each group."""
        room = min(pool.room for pool in self.pools)
        if most is not None:
            room = min(room, *most)
        return min(length, (len(seq.pages[0]) + max(0, room)) * self.size)

    def extend(self, seq: Sequence, length: int) -> list[Change] | None:
        """Pages so that `length` tokens fit; evicts; None if there is no room, and nothing changed."""
        first = len(seq.pages[0])
        need = -(-length // self.size) - first
        if need <= 0:
            return []
        if any(pool.room < need for pool in self.pools):
            return None
        changes: list[Change] = []
        for group, table in enumerate(seq.pages):
            new = self._take(group, need)
            table += new
            changes.append((group, first, new))
        return changes

    def publish(self, seq: Sequence) -> list[Change]:
        """Let others share the full pages. Gives what to correct in the device's table: someone
        else had computed the same pages, and the duplicates are free now."""
        full = min(seq.computed, len(seq.tokens)) // self.size
        first = seq.shared
        if full <= first:
            return []
        key = seq.tokens[first * self.size : full * self.size].tobytes()
        for group, pool in self.windows:
            for page in seq.pages[group][first:full]:
                if page:
                    pool.refs[page] = 1
        below = seq.node
        node, had = self.tree.insert(below, key, [table[first:full] for table in seq.pages])
        self.tree.lock(node, below)
        seq.node, seq.shared = node, full
        self.bonds += bool(had)  # what was not there is nobody else's
        changes = [change for other in had for change in self._merge(seq, other)]
        self._make(seq)
        return changes

    def slide(self, seq: Sequence) -> list[Change]:
        """Give back what fell behind the windows; its entries in the table become 0."""
        changes: list[Change] = []
        for group, pool in self.windows:
            end = seq.computed // self.size - pool.window
            table = seq.pages[group]
            start = end
            while start > 0 and table[start - 1]:
                start -= 1
            if start < end:
                self._let_go(seq, group, start, end)
                table[start:end] = [0] * (end - start)
                changes.append((group, start, [0] * (end - start)))
        self.gains += bool(changes)
        return changes

    def release(self, seq: Sequence) -> None:
        """Publish, keep the last page as a tail, unlock, free the rest. Nothing happens to a sequence
        that holds nothing."""
        self.blocked.pop(seq, None)
        if seq.node is None:
            return
        self.publish(seq)
        self._unmake(seq)
        self._keep(seq)
        for group, pool in enumerate(self.pools):
            if pool.window:
                self._let_go(seq, group, 0, len(seq.pages[group]))
            else:
                pool.free += seq.pages[group][seq.shared :]
        self.tree.unlock(seq.node)
        seq.pages, seq.shared, seq.node = [], 0, None
        self.gains += 1
        self.bonds += 1

    def check(self, live: list[Sequence]) -> None:
        """Every page is in exactly one place; locks and counts from first principles (for tests)."""
        check(self, live)

    # ---- looking ------------------------------------------------------------------------
    def shares(self, holders: Iterable[Sequence]) -> list[Share]:
        """Runs of pages that two or more have in common, in the groups without a window: what the tree
        has, so their KV is computed. `holders`: all that hold something, each in a slot."""
        return shares(holders, self.shortest) if self.tree.full else []

    def peek(self, seq: Sequence) -> int:
        """How many tokens of it the tree has, in whole pages; nothing is locked or touched.

        0 for one that waits for a sibling: it cannot be admitted now."""
        root = self.tree.roots.get(seq.request.space)
        if root is None or self.blocked.get(seq) in self.making:
            return 0
        usable = (len(seq.tokens) - 1) // self.size
        return self.tree.match(root, seq.tokens.tobytes(), usable)[1] * self.size

    def held(self, seq: Sequence, group: int) -> int:
        """Pages of a group in its table, shared ones too."""
        window = self.pools[group].window
        behind = max(0, seq.computed // self.size - window) if window else 0
        return len(seq.pages[group]) - behind

    def needs(self, length: int, group: int) -> int:
        """Pages that a sequence needs to go on, one token at a time, until it has `length` tokens."""
        pages, window = -(-length // self.size), self.pools[group].window
        return min(pages, window + 1) if window else pages

    def smallest(self, length: int) -> list[tuple[int, int]]:
        """By group: pages that a sequence of `length` tokens needs, alone, and pages there are."""
        return [(self.needs(length, group), pool.total) for group, pool in enumerate(self.pools)]

    def view(self, live: Iterable[Sequence] = ()) -> View:
        """Memory in numbers."""
        total = sum(pool.total for pool in self.pools)
        cached = sum(pool.idle for pool in self.pools)
        held = total - cached - sum(len(pool.free) for pool in self.pools)
        empty = sum(max(0, len(t) * self.size - seq.planned) for seq in live for t in seq.pages)
        return View(total, held, cached, held * self.size, held * self.size - empty)

    def flush(self) -> None:
        """Forget what nobody holds."""
        self.tree.flush()

    # ---- inside -------------------------------------------------------------------------
    def _take(self, group: int, count: int) -> list[int]:
        pool = self.pools[group]
        if count > len(pool.free):
            self.tree.evict(group, count - len(pool.free))
        if count == 1:
            return [pool.free.pop()]
        new = pool.free[-count:]
        del pool.free[-count:]
        return new

    def _path(self, node: Node, group: int, count: int) -> list[int]:
        """The table of a sequence that starts after `node`; of a window group, only the window."""
        pool = self.pools[group]
        if not pool.window:
            return self.tree.path(node, group)
        behind = max(0, count - pool.window)
        pages = self.tree.path(node, group, behind)
        for page in pages:
            pool.idle -= pool.refs[page] == 0
            pool.refs[page] += 1
        return [0] * behind + pages

    def _inside(self, seq: Sequence, rest: bytes) -> list[Copy]:
        """A match inside the next page: fresh pages, to which its front is copied from the tree's."""
        child, tokens = self.tree.near(seq.node, rest)
        if child is None or any(not pool.room for pool in self.pools):
            return []
        sources = [pages[0] for pages in child.pages]
        targets = [self._take(group, 1) for group in range(len(self.pools))]
        if child.parent is None or sources != [pages[0] for pages in child.pages]:
            for pool, target in zip(self.pools, targets, strict=True):
                pool.free += target  # the only page to be had was the source itself
            return []
        child.used = self.tree.clock
        seq.planned += tokens
        for table, target in zip(seq.pages, targets, strict=True):
            table += target
        both = zip(sources, targets, strict=True)
        return [Copy(group, source, target[0], tokens) for group, (source, target) in enumerate(both)]

    def _merge(self, seq: Sequence, node: Node) -> list[Change]:
        """Use the pages of a node that the tree had, instead of our own for the same tokens."""
        changes: list[Change] = []
        start, end = node.start, node.end
        for group, pool in enumerate(self.pools):
            table, theirs = seq.pages[group], node.pages[group]
            mine = table[start:end]
            if not pool.window:
                pool.free += mine
                table[start:end] = theirs
            else:
                for index, (page, kept) in enumerate(zip(mine, theirs, strict=True)):
                    if page and kept:
                        pool.refs[page] = 0
                        pool.free.append(page)
                        pool.idle -= pool.refs[kept] == 0
                        pool.refs[kept] += 1
                        table[start + index] = kept
                    elif page:
                        theirs[index] = page  # the tree had lost its own
            if table[start:end] != mine:
                changes.append((group, start, table[start:end]))
        self.gains += 1
        return changes

    def _keep(self, seq: Sequence) -> None:
        """Give the tree the last page, which is not full, unless it has those tokens. Flights may
        still write behind them: nobody reads that."""
        at = seq.shared
        key = seq.tokens[at * self.size : min(seq.computed, len(seq.tokens))].tobytes()
        if key and self.tree.keep(seq.node, key, [[table[at]] for table in seq.pages]):
            for table in seq.pages:
                del table[at]

    def _let_go(self, seq: Sequence, group: int, start: int, end: int) -> None:
        """A window group's pages in [start, end) of its table: to the tree if it has them, or free."""
        pool, table = self.pools[group], seq.pages[group]
        pool.free += [page for page in table[max(start, seq.shared) : end] if page]
        idle = pool.idle
        for page in table[start : min(end, seq.shared)]:
            if page:
                pool.refs[page] -= 1
                pool.idle += pool.refs[page] == 0
        node = seq.node
        while pool.idle > idle and node.end > start:
            if node.start < end:
                self.tree.idle(node, group)
            node = node.parent

    def _make(self, seq: Sequence) -> None:
        """Say which page it computes next, if all tokens of that page are known."""
        self._unmake(seq)
        begin = seq.shared * self.size
        page = seq.tokens[begin : begin + self.size].tobytes()
        if len(page) == self.size * TOKEN:
            self.maker[seq] = key = seq.node, page
            self.making.setdefault(key, seq)

    def _has(self, node: Node, page: bytes) -> bool:
        """Whether the tree can serve this page below `node`."""
        child = node.children.get(page)
        return child is not None and all(child.pages[group][0] for group, _ in self.windows)

    def _unmake(self, seq: Sequence) -> None:
        if (key := self.maker.pop(seq, None)) is not None and self.making.get(key) is seq:
            del self.making[key]
