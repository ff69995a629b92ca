"""Runs of pages in common, from first principles: what the host should tell, and what the device must find true.

`expected` compares page tables, page by page, and knows of no tree. `problems` looks at a fake
device's own tables and KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trine.core.types import Sequence, Share


def expected(running: list[Sequence], group: int, shortest: int) -> list[Share]:
    """What sequences have in common in their published pages of a group without a window."""
    tables = {seq.slot: seq.pages[group][: seq.shared] for seq in running}
    found = [run for part in _split(tables, 0) for run in _runs(part, 0, shortest)]
    return sorted(found, key=_place)


def same(told: list[Share], wanted: list[Share]) -> bool:
    """Whether both name the same runs; each run once."""
    return sorted(told, key=_place) == wanted


def _split(tables: dict[int, list[int]], at: int) -> Iterator[dict[int, list[int]]]:
    """Those that have the same page at an index, together; two at least."""
    parts: dict[int, dict[int, list[int]]] = {}
    for slot, pages in tables.items():
        if at < len(pages):
            parts.setdefault(pages[at], {})[slot] = pages
    return (part for part in parts.values() if len(part) > 1)


def _runs(tables: dict[int, list[int]], first: int, shortest: int) -> Iterator[Share]:
    """All the same up to some page, and no further. Too short a run is left to those that go on."""
    ends = (at for at in range(first, 1 + max(map(len, tables.values()))) if not _alike(tables, at))
    end = next(ends)
    if end - first >= shortest:
        yield Share(first, end - first, sorted(tables))
    for part in _split(tables, end):
        yield from _runs(part, end if end - first >= shortest else first, shortest)


def _alike(tables: dict[int, list[int]], at: int) -> bool:
    return len({pages[at] if at < len(pages) else -slot for slot, pages in tables.items()}) == 1


def _place(share: Share) -> tuple[int, list[int]]:
    return share.first, share.slots


def orderly(shares: list[Share]) -> None:
    """The shape that a kernel may count on."""
    runs: dict[int, list[Share]] = {}  # by slot
    for share in shares:
        assert share.count > 0 and share.first >= 0, f"an empty run: {share}"
        assert len(set(share.slots)) == len(share.slots) > 1, f"no two slots, or one twice: {share}"
        for slot in share.slots:
            runs.setdefault(slot, []).append(share)
    for slot, mine in runs.items():
        assert mine[0].first == 0, f"slot {slot}: its first run begins at page {mine[0].first}"
        for above, below in pairwise(mine):
            assert below.first == above.first + above.count, f"slot {slot}: {below} after {above}"
            assert set(below.slots) < set(above.slots), f"slot {slot}: {below} is not below {above}"
