"""Which runs of pages running sequences have in common, read off the tree: attention reads each once for all.

It looks at nodes and locks only, and changes nothing. It does not know what is made of a run.
"""

from __future__ import annotations

from collections.abc import Iterable

from trine.core.types import Sequence, Share

from .tree import Node

# Tokens. Whoever is in a run has one more part to merge, for each head: dim numbers written and read.
# A run of 64 tokens spares each member but the first 64 x 2 x dim, which is worth it also for two.
SHORTEST = 64


def shares(holders: Iterable[Sequence], shortest: int) -> list[Share]:
    """Runs of at least `shortest` pages that two or more hold, each after the one that it continues.

    `holders` are all that hold a lock, each in a slot. A run that is too short by itself is read as
    the beginning of the runs below it, by the members of those."""
    members: dict[Node, list[int]] = {}
    for seq in holders:
        node: Node = seq.node
        while node.locks == 1 and node.parent is not None:
            node = node.parent
        if node.parent is None:
            continue
        if (mine := members.get(node)) is not None:
            mine.append(seq.slot)
        else:
            members[node] = [seq.slot]
    _complete(members)
    return _runs(members, shortest)


def _complete(members: dict[Node, list[int]]) -> None:
    """By node that two or more hold: the slots of all that hold it, also those that go on below it."""
    for node in list(members):
        above = node.parent
        while above is not None and above.parent is not None and above not in members:
            members[above] = []
            above = above.parent
    for node in sorted(members, key=_end, reverse=True):
        if node.parent not in members:
            continue
        if node.parent.locks == node.locks:
            members[node.parent] = members[node]  # all of them
        else:
            members[node.parent] += members[node]


def _runs(members: dict[Node, list[int]], shortest: int) -> list[Share]:
    """Nodes that follow each other with the same members are one run."""
    found: dict[Node, Share] = {}  # by the last node of a run, so far
    for node in sorted(members, key=_end):
        parent, first = node.parent, node.start
        if parent in found:
            above, alike = found[parent], parent.locks == node.locks
            if alike or above.count < shortest:
                first = above.first
            if alike:
                del found[parent]
        found[node] = Share(first, node.end - first, members[node])
    runs = [run for run in found.values() if run.count >= shortest]
    for run in runs:
        run.slots.sort()
    return runs


def _end(node: Node) -> int:
    return node.end
