"""The truth about pages, counted from first principles: tests call it after each step.

It believes nothing that the cache keeps up as it goes (locks, counts of use, idle pages, heaps).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from trine.core.types import Sequence

from .tree import TAILS, Node

if TYPE_CHECKING:
    from .manager import Cache


def check(cache: Cache, live: list[Sequence]) -> None:
    """AssertionError says what is wrong. `live`: all that may hold something."""
    holding = [seq for seq in live if seq.node is not None]
    nodes = list(cache.tree.nodes())
    for node in nodes:
        _node(cache, node)
    for kind, heap in enumerate(cache.tree.heaps):
        entries = Counter(entry[3] for entry in heap)
        assert all(entries[node] == node.listed >> kind & 1 for node in nodes), "listed twice, or not at all"
    for seq in holding:
        _sequence(cache, seq)
    _locks(cache, nodes, holding)
    for group in range(len(cache.pools)):
        _pages(cache, group, nodes, holding)
    makers = {seq for seq in holding if seq in cache.maker}
    assert set(cache.maker) == makers, "a sequence that holds nothing is said to make a page"
    assert all(cache.maker.get(seq) == key for key, seq in cache.making.items()), "nobody makes a page"


def _node(cache: Cache, node: Node) -> None:
    tree = cache.tree
    if node.parent is not None and node in node.parent.tails:
        _tail(cache, node)
    elif node.parent is not None:
        assert len(node.key) == node.count * tree.step, "a key that is not whole pages"
    assert all(len(pages) == node.count for pages in node.pages)
    assert node.end == node.count + (node.parent.end if node.parent else 0)
    assert node.parent is None or node.count, "an empty node"
    assert node.order == sorted(node.children)
    assert not any(b.startswith(a) for a, b in pairwise(node.order)), "a child begins with another"
    assert all(node.children.get(tail.key) is tail for tail in node.tails), "a tail that is no child"
    assert len(node.tails) <= TAILS
    for first, child in node.children.items():
        assert child.parent is node
        assert child.key[: tree.step] == first, "a child under a foreign key"
        assert node.locks or child.used <= node.used, "used later than what is above it"
    for group, pool in enumerate(cache.pools):
        assert pool.window or all(node.pages[group]), "a page is missing in a group without a window"
        if pool.window and any(p and not pool.refs[p] for p in node.pages[group]):
            assert node.listed >> (1 + group) & 1, "idle pages that eviction would not find"
    if node.parent is not None and not node.children and not node.locks and tree.full:
        assert node.listed & 1, "a leaf that eviction would not find"


def _tail(cache: Cache, tail: Node) -> None:
    assert 0 < len(tail.key) < cache.tree.step, "a tail that is empty or a whole page"
    assert tail.count == 1 and not tail.children and not tail.locks, "a tail that is held"
    assert all(pages[0] for pages in tail.pages), "a page is missing in a tail"
    for (page,), pool in zip(tail.pages, cache.pools, strict=True):
        assert not pool.window or not pool.refs[page], "a tail that is in use"


def _sequence(cache: Cache, seq: Sequence) -> None:
    size = cache.size
    assert seq.node.end == seq.shared, "its node ends elsewhere than its shared pages"
    assert len({len(table) for table in seq.pages}) == 1
    assert seq.shared * size <= seq.computed <= seq.planned <= len(seq.pages[0]) * size
    key: bytes = b""
    node: Node = seq.node
    while node.parent is not None:
        key, node = node.key + key, node.parent
    assert key == seq.tokens[: seq.shared * size].tobytes(), "shared pages of other tokens"
    assert node is cache.tree.roots[seq.request.space], "pages of another space"
    for group, pool in enumerate(cache.pools):
        table, behind = seq.pages[group], 0
        if pool.window:
            behind = max(0, seq.computed // size - pool.window)
        assert not any(table[:behind]), "a page behind the window is kept"
        assert all(table[behind:]), "a page is missing"
        path = cache.tree.path(seq.node, group, behind)
        assert table[behind : seq.shared] == path, "its table is not the tree's"


def _locks(cache: Cache, nodes: list[Node], holding: list[Sequence]) -> None:
    locks: Counter[Node] = Counter()
    for seq in holding:
        node: Node | None = seq.node
        while node is not None:
            locks[node] += 1
            node = node.parent
    for node in nodes:
        assert node.locks == locks[node], f"locked {node.locks} times by {locks[node]}"
        assert node.parent is not None or node.children or node.locks, "an empty space is kept"
    assert len(set(locks) - set(nodes)) == 0, "a node that is held is not in the tree"
    assert cache.tree.size == sum(node.parent is not None for node in nodes)


def _pages(cache: Cache, group: int, nodes: list[Node], holding: list[Sequence]) -> None:
    pool = cache.pools[group]
    shared = [page for node in nodes for page in node.pages[group] if page]
    private = [page for seq in holding for page in seq.pages[group][seq.shared :] if page]
    seen = sorted(pool.free + shared + private)
    assert seen == list(range(1, pool.total + 1)), f"group {group}: a page leaked, or is in two places"
    if not pool.window:
        idle = sum(node.count for node in nodes if not node.locks)
    else:
        refs = Counter(page for seq in holding for page in seq.pages[group][: seq.shared] if page)
        idle = sum(not refs[page] for page in shared)
        assert all(pool.refs[page] == refs[page] for page in shared), f"group {group}: miscounted use"
    assert pool.idle == idle, f"group {group}: {pool.idle} pages are said to be idle, and {idle} are"
