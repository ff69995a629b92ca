"""The plan of a step's attention, made on the device from its own lengths: who computes which part.

Attention over paged KV is a list of segments: queries that see the same run of positions. A segment is
measured in blocks of N positions; all heads of all segments, one behind the other, make one long line of blocks
that is cut into equal chunks, one for each program, wherever the cuts fall. So every program has as much to do
as any other, whatever the lengths are, and a segment has at most as many parts as programs touch it: in closed
form, those from `begin // chunk` to `(end - 1) // chunk`.

Tables are of int32. A segment (8 numbers): 0 its row (of a shared run: its place in the list), 1 the slot whose
page table leads to it, 2 first position, 3 end, 4 blocks of one head before it, 5 the same with its own, 6 its
place in the list, 7 how many shared runs belong to it. A row (4): 0 blocks before it, 1 its blocks, 2 its place
in the list, 3 its shared runs. A tile, which is a shared run with up to TM slots: the first three. A row's chain:
for each of its shared runs (4) the tile's three numbers and the row's seat in it.
Head: 0 and 1 blocks in all and the chunk, of rows; 2 and 3, of tiles; 4 tiles of prompts; 5 whether no row is cut.

Nothing here knows of heads' contents, layers or dtypes.
"""

import triton
import triton.language as tl

from . import Sample


@triton.jit
def plan_singles(
    SLOTS, LENGTHS, SHARE, HEAD, ROWS, LIST1, DESK1, TILES, LIST2, DESK2, SEATS, ROWOF, CHAIN, n, programs, programs2,
    H: tl.constexpr, S: tl.constexpr, T: tl.constexpr, TM: tl.constexpr, DEPTH: tl.constexpr, N1: tl.constexpr,
    N2: tl.constexpr, LEAST: tl.constexpr, RB: tl.constexpr, TB: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    RUN: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. `n` rows of one token each; SHARE as `share` in the backend lays it out. WHOLE: nobody asks for
    segments of rows.

    RUN: blocks are runs of so many positions, from multiples of it on; rows are not cut where they are many, or
    where there are more than MOST runs."""
    if PDL:
        tl.extra.cuda.gdc_wait()  # and no early launch of others: they read the plan before they wait
    if SHARED:
        for s0 in range(0, S, RB):
            s = s0 + tl.arange(0, RB)
            tl.store(ROWOF + s, tl.full([RB], -1, tl.int32), mask=s < S)
        tl.debug_barrier()
    listed, blocks = _rows(SLOTS, LENGTHS, SHARE + 16, ROWS, LIST1, ROWOF, n, S, N1, RB, WINDOW, SHARED, RUN)
    tl.debug_barrier()
    if RUN > 0:
        whole = (blocks * H > MOST) | (listed * H >= 4 * programs)
        tl.store(HEAD + 5, whole.to(tl.int32))
        if whole:
            blocks = listed
            for s0 in range(0, listed, RB):
                s = s0 + tl.arange(0, RB)
                tl.store(LIST1 + s * 8 + 4, s, mask=s < listed)
                tl.store(LIST1 + s * 8 + 5, s + 1, mask=s < listed)
        tl.debug_barrier()
    if not WHOLE:
        chunk = tl.maximum(tl.cdiv(blocks * H, programs), LEAST)
        tl.store(HEAD, blocks * H)
        tl.store(HEAD + 1, chunk)
        _spread(LIST1, DESK1, listed, chunk, H, RB)
    if SHARED:
        tiles = tl.load(SHARE)
        runs = SHARE + 16 + (2 + DEPTH) * S
        listed, blocks = _tiles(runs, ROWOF, TILES, LIST2, SEATS, tiles, T, TM, N2, TB)
        tl.debug_barrier()
        chunk = tl.maximum(tl.cdiv(blocks * H, programs2), LEAST)
        tl.store(HEAD + 2, blocks * H)
        tl.store(HEAD + 3, chunk)
        _spread(LIST2, DESK2, listed, chunk, H, RB)
        _chains(SLOTS, SHARE + 16 + 2 * S, ROWS, TILES, CHAIN, n, TM, DEPTH, RB)


@triton.jit
def _rows(
    SLOTS, LENGTHS, OWN, ROWS, LIST, ROWOF, n,
    S: tl.constexpr, N: tl.constexpr, RB: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Each row's own positions: those behind what it shares. Returns how many segments, and their blocks."""
    listed = tl.sum(tl.zeros([RB], tl.int32), 0)
    blocks = tl.sum(tl.zeros([RB], tl.int32), 0)
    for r0 in range(0, n, RB):
        r = r0 + tl.arange(0, RB)
        slot = tl.load(SLOTS + r, mask=r < n, other=0).to(tl.int32)
        length = tl.load(LENGTHS + r, mask=r < n, other=0).to(tl.int32)
        live = slot > 0  # slot 0 only fills a step up
        first = tl.zeros([RB], tl.int32)
        depth = tl.zeros([RB], tl.int32)
        if WINDOW > 0:
            first = tl.maximum(length - WINDOW, 0)
        if SHARED:
            own = tl.load(OWN + slot, mask=live, other=0)
            shares = live & (own > 0) & (length >= own)
            tl.store(ROWOF + slot, r, mask=shares)
            first = tl.where(shares, own, 0)
            depth = tl.load(OWN + S + slot, mask=shares, other=0)
        # A row that has nothing of its own is written all the same, by whom it is given to.
        size = tl.where(live, tl.maximum(tl.cdiv(length - first, N), 1), 0)
        if RUN > 0:
            size = tl.where(live, tl.cdiv(length, RUN) - first // RUN, 0)
        some = tl.minimum(size, 1)
        place = listed + tl.cumsum(some, 0) - some
        end = blocks + tl.cumsum(size, 0)
        _entry(LIST, place, r, slot, first, length, end - size, end, depth, size > 0)
        row = ROWS + r * 4
        tl.store(row, end - size, mask=r < n)
        tl.store(row + 1, size, mask=r < n)
        tl.store(row + 2, place, mask=r < n)
        tl.store(row + 3, depth, mask=r < n)
        listed += tl.sum(some, 0)
        blocks += tl.sum(size, 0)
    return listed, blocks


@triton.jit
def _tiles(
    RUNS, ROWOF, TILES, LIST, SEATS, tiles,
    T: tl.constexpr, TM: tl.constexpr, N: tl.constexpr, TB: tl.constexpr,
):  # fmt: skip
    """Shared runs of which a member is here. RUNS: first [T], count [T], slots [T, TM]."""
    listed = tl.sum(tl.zeros([TB], tl.int32), 0)
    blocks = tl.sum(tl.zeros([TB], tl.int32), 0)
    P: tl.constexpr = triton.next_power_of_2(TM)
    seat = tl.arange(0, P)
    for t0 in range(0, tiles, TB):
        t = t0 + tl.arange(0, TB)
        ok = t < tiles
        mask = ok[:, None] & (seat < TM)[None, :]
        slots = tl.load(RUNS + 2 * T + t[:, None] * TM + seat[None, :], mask=mask, other=0)
        rows = tl.load(ROWOF + slots, mask=slots > 0, other=-1)
        guide = tl.max(tl.where(rows >= 0, slots, 0), 1)  # any member that is here leads to the pages
        first = tl.load(RUNS + t, mask=ok, other=0)
        count = tl.load(RUNS + T + t, mask=ok, other=0)
        size = tl.where(guide > 0, tl.cdiv(count, N), 0)
        some = tl.minimum(size, 1)
        place = listed + tl.cumsum(some, 0) - some
        end = blocks + tl.cumsum(size, 0)
        _entry(LIST, place, place, guide, first, first + count, end - size, end, 0, size > 0)
        tl.store(SEATS + place[:, None] * TM + seat[None, :], rows, mask=mask & (size > 0)[:, None])
        tile = TILES + t * 4
        tl.store(tile, end - size, mask=ok)
        tl.store(tile + 1, size, mask=ok)
        tl.store(tile + 2, place, mask=ok)
        listed += tl.sum(some, 0)
        blocks += tl.sum(size, 0)
    return listed, blocks


@triton.jit
def _chains(SLOTS, SEATED, ROWS, TILES, CHAIN, n, TM: tl.constexpr, DEPTH: tl.constexpr, RB: tl.constexpr):
    """Where the parts of each row's shared runs are to be found. SEATED [slots, DEPTH]: tile * TM + seat."""
    for r0 in range(0, n, RB):
        r = r0 + tl.arange(0, RB)
        slot = tl.load(SLOTS + r, mask=r < n, other=0).to(tl.int32)
        depth = tl.load(ROWS + r * 4 + 3, mask=r < n, other=0)
        for i in range(0, tl.max(depth, 0)):
            ok = i < depth
            seat = tl.load(SEATED + slot * DEPTH + i, mask=ok, other=0)
            entry = CHAIN + (r * DEPTH + i) * 4
            for k in tl.static_range(3):
                tl.store(entry + k, tl.load(TILES + seat // TM * 4 + k, mask=ok), mask=ok)
            tl.store(entry + 3, seat % TM, mask=ok)


@triton.jit
def _entry(LIST, place, what, slot, first, end, before, behind, depth, mask):
    entry = LIST + place * 8
    tl.store(entry, what, mask=mask)
    tl.store(entry + 1, slot, mask=mask)
    tl.store(entry + 2, first, mask=mask)
    tl.store(entry + 3, end, mask=mask)
    tl.store(entry + 4, before, mask=mask)
    tl.store(entry + 5, behind, mask=mask)
    tl.store(entry + 6, place, mask=mask)
    tl.store(entry + 7, depth, mask=mask)


@triton.jit
def _spread(LIST, DESK, listed, chunk, H: tl.constexpr, RB: tl.constexpr):
    """To each program the segment that it begins in."""
    for s0 in range(0, listed, RB):
        s = s0 + tl.arange(0, RB)
        ok = s < listed
        begin = tl.load(LIST + s * 8 + 4, mask=ok, other=0) * H
        end = tl.load(LIST + s * 8 + 5, mask=ok, other=0) * H
        program = tl.cdiv(begin, chunk)
        count = tl.where(ok, (end - 1) // chunk - program + 1, 0)
        row, slot = tl.load(LIST + s * 8, mask=ok), tl.load(LIST + s * 8 + 1, mask=ok)
        first, last = tl.load(LIST + s * 8 + 2, mask=ok), tl.load(LIST + s * 8 + 3, mask=ok)
        c0, c1 = tl.load(LIST + s * 8 + 4, mask=ok), tl.load(LIST + s * 8 + 5, mask=ok)
        depth = tl.load(LIST + s * 8 + 7, mask=ok)
        for k in range(0, tl.max(count, 0)):
            entry = DESK + (program + k) * 8
            tl.store(entry, row, mask=k < count)
            tl.store(entry + 1, slot, mask=k < count)
            tl.store(entry + 2, first, mask=k < count)
            tl.store(entry + 3, last, mask=k < count)
            tl.store(entry + 4, c0, mask=k < count)
            tl.store(entry + 5, c1, mask=k < count)
            tl.store(entry + 6, s, mask=k < count)
            tl.store(entry + 7, depth, mask=k < count)


@triton.jit
def plan_prompts(STARTS, HEAD, LIST, singles, rows, TM: tl.constexpr, RB: tl.constexpr):
    """One program: LIST gets (row, tile) for each TM tokens of the rows behind the singles."""
    total = tl.sum(tl.zeros([RB], tl.int32), 0)
    for r0 in range(singles, rows, RB):
        r = r0 + tl.arange(0, RB)
        ok = r < rows
        start = tl.load(STARTS + r, mask=ok, other=0)
        count = (tl.load(STARTS + r + 1, mask=ok, other=0) - start).to(tl.int32)
        tiles = tl.cdiv(count, TM)
        place = total + tl.cumsum(tiles, 0) - tiles
        for k in range(0, tl.max(tiles, 0)):
            tl.store(LIST + (place + k) * 2, r, mask=k < tiles)
            tl.store(LIST + (place + k) * 2 + 1, tl.zeros([RB], tl.int32) + k, mask=k < tiles)
        total += tl.sum(tiles, 0)
    tl.store(HEAD + 4, total)


def samples() -> list[Sample]:
    tables = (
        "SLOTS",
        "LENGTHS",
        "SHARE",
        "HEAD",
        "ROWS",
        "LIST1",
        "DESK1",
        "TILES",
        "LIST2",
        "DESK2",
        "SEATS",
        "ROWOF",
        "CHAIN",
    )
    shape = {
        "H": 8,
        "S": 257,
        "T": 128,
        "TM": 16,
        "DEPTH": 8,
        "N1": 64,
        "N2": 64,
        "LEAST": 1,
        "RB": 256,
        "TB": 16,
        "WINDOW": 0,
    }
    return [
        Sample(
            plan_singles,
            dict.fromkeys(tables, "*i32") | {"n": "i32", "programs": "i32", "programs2": "i32"},
            shape | {"SHARED": True, "RUN": 0, "MOST": 0, "WHOLE": False},
            {"num_warps": 8},
        ),
        Sample(
            plan_prompts,
            dict.fromkeys(("STARTS", "HEAD", "LIST"), "*i32") | {"singles": "i32", "rows": "i32"},
            {"TM": 16, "RB": 128},
        ),
    ]
