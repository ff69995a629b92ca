"""Attention over paged KV: decoding rows through the radix tree, prompts, and the merge of parts.

`parts` walks a line of blocks (see plan.py): each program attends over its chunk of the rows' own positions and
its chunk of the shared runs. Half of the programs begin with the one, half with the other: reading what is
private is bound by memory, the products over what many rows share by the tensor cores, and so both are busy.
A row whose positions were all seen by one program is written at once; parts of all others are kept in float32,
unnormalized, with their maximum and sum, and `merge` adds them up. `prompts` serves rows of several tokens.

Softmax is of base 2. A masked score is minus infinity; a maximum never falls under NEVER, so no difference of
infinities arises. Queries of a tile: place m is row m // G of the tile, head m % G of the KV head.
"""

import triton
import triton.language as tl

from . import TARGETS, Sample

NEVER: tl.constexpr = tl.constexpr(-1e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(s, scale, SOFTCAP: tl.constexpr):
    """Times log2(e). `scale` has that factor in it, or with a softcap 2 * log2(e) / softcap."""
    if SOFTCAP > 0.0:
        return (SOFTCAP * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(s * scale)))
    return s * scale


@triton.jit
def _attend(
    q, high, weight, acc, K, V, PAGES, begin, low, end, edge, page_stride, place_stride, scale,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Folds positions max(begin, low)..end into (high, weight, acc), in blocks that start at `begin`; `low` counts with
    a window only, and lies in the first block.

    Pages are looked up a block ahead, so that nothing which is read waits for something else to be read.
    CAUSAL: a query at edge[m] sees no position behind it, nor (WINDOW) any that is not of its last WINDOW."""
    d = tl.arange(0, DP)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    t = begin + tl.arange(0, N)
    there = t < end
    if WINDOW > 0:
        there = there & (t >= low)
    page = tl.load(PAGES + t // PAGE, mask=there, other=0)
    for p in tl.range(begin, end, N, num_stages=STAGES):
        t = p + tl.arange(0, N)
        ok = t < end
        if WINDOW > 0:
            ok = ok & (t >= low)
        at = page.to(tl.int64) * page_stride + (t % PAGE) * place_stride
        mask = ok[:, None] if D == DP else ok[:, None] & (d < D)[None, :]
        k = tl.load(K + at[:, None] + d[None, :], mask=mask, other=0.0).to(q.dtype)
        v = tl.load(V + at[:, None] + d[None, :], mask=mask, other=0.0).to(q.dtype)
        page = tl.load(PAGES + (t + N) // PAGE, mask=t + N < end, other=0)
        s = _scores(tl.dot(q, tl.trans(k), input_precision=precision), scale, SOFTCAP)
        seen = ok[None, :]
        if CAUSAL:
            seen = seen & (t[None, :] <= edge[:, None])
            if WINDOW > 0:
                seen = seen & (t[None, :] > edge[:, None] - WINDOW)
        s = tl.where(seen, s, -float("inf"))
        higher = tl.maximum(high, tl.max(s, 1))
        w = tl.exp2(s - higher[:, None])
        fade = tl.exp2(high - higher)
        weight = weight * fade + tl.sum(w, 1)
        acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None], input_precision=precision)
        high = higher
    return high, weight, acc


@triton.jit
def _finish(high, weight, acc, SINK, sink, mask, SINKS: tl.constexpr):
    """The values. A sink is one more score, of no value."""
    if SINKS:
        logit = tl.load(SINK + sink, mask=mask, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(high, logit)
        fade = tl.exp2(high - higher)
        weight = weight * fade + tl.exp2(logit - higher)
        acc = acc * fade[:, None]
    return acc / tl.where(weight > 0.0, weight, 1.0)[:, None]


@triton.jit
def _keep(VALUES, SUMS, place, high, weight, acc, mask, D: tl.constexpr, DP: tl.constexpr):
    """One part. place [M]: its line in VALUES [lines, D] and SUMS [lines, 2]."""
    d = tl.arange(0, DP)
    place = place.to(tl.int64)
    kept = mask[:, None] if D == DP else mask[:, None] & (d < D)[None, :]
    tl.store(VALUES + place[:, None] * D + d[None, :], acc, mask=kept)
    tl.store(SUMS + place * 2, high, mask=mask)
    tl.store(SUMS + place * 2 + 1, weight, mask=mask)


@triton.jit
def _segment(ENTRY):
    return (
        tl.load(ENTRY), tl.load(ENTRY + 1), tl.load(ENTRY + 2), tl.load(ENTRY + 3),
        tl.load(ENTRY + 4), tl.load(ENTRY + 5), tl.load(ENTRY + 6), tl.load(ENTRY + 7),
    )  # fmt: skip


@triton.jit
def _work(HEAD, DESK):
    """This program's chunk: where in the line of work it begins and ends, and the segment there."""
    pid = tl.program_id(0)
    total, chunk = tl.load(HEAD), tl.load(HEAD + 1)
    begin = pid * chunk
    row, slot, first, end, c0, c1, place, alone = _segment(DESK + pid * 8)
    return begin, tl.minimum(begin + chunk, total), row, slot, first, end, c0, c1, place, alone


@triton.jit
def _private(
    Q, K, V, PAGES, OUT, SINK, work, LIST, VALUES, SUMS, q_stride, pages_stride, page_stride, place_stride,
    head_stride, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's chunk of the rows' own positions: M places for one row's G heads."""
    pid = tl.program_id(0)
    g, d = tl.arange(0, M), tl.arange(0, DP)
    mask = g < G
    cells = mask[:, None] & (d < D)[None, :]
    x, stop, row, slot, first, end, c0, c1, place, alone = work
    while x < stop:
        # The next segment's numbers are asked for before this one's long loop.
        row2, slot2, first2, end2, c2, c3, place2, alone2 = _segment(LIST + (place + 1) * 8)
        blocks = c1 - c0
        head = (x - c0 * H) // blocks
        block = (x - c0 * H) % blocks
        n = tl.minimum(blocks - block, stop - x)
        begin = first + block * N
        line = (row * H + head) * G + g
        at = row.to(tl.int64) * q_stride + (head * G + g) * D
        q = tl.load(Q + at[:, None] + d[None, :], mask=cells, other=0.0)
        high = tl.full([M], NEVER, tl.float32)
        high, weight, acc = _attend(
            q, high, tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32),
            K + head * head_stride, V + head * head_stride, PAGES + slot.to(tl.int64) * pages_stride,
            begin, first, tl.minimum(begin + n * N, end), g, page_stride, place_stride, scale,
            D, DP, PAGE, N, WINDOW, SOFTCAP, False, EXACT, STAGES,
        )  # fmt: skip
        if (n == blocks) & (alone == 1):
            value = _finish(high, weight, acc, SINK, head * G + g, mask, SINKS)
            tl.store(
                OUT + line.to(tl.int64)[:, None] * D + d[None, :], value.to(OUT.dtype.element_ty), mask=cells
            )
        else:
            _keep(VALUES, SUMS, (place * H + head + pid) * G + g, high, weight, acc, mask, D, DP)
        x += n
        over = x >= c1 * H
        row, slot = tl.where(over, row2, row), tl.where(over, slot2, slot)
        first, end = tl.where(over, first2, first), tl.where(over, end2, end)
        c0, c1 = tl.where(over, c2, c0), tl.where(over, c3, c1)
        place, alone = tl.where(over, place2, place), tl.where(over, alone2, alone)


@triton.jit
def _flat(
    Q, K, V, PAGES, OUT, SINK, work, LIST, VALUES, SUMS, q_stride, pages_stride, page_stride, place_stride,
    head_stride, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """This program's chunk of the rows' own positions in one loop over its blocks, so that reading runs ahead over the
    ends of segments; M places for one row's G heads. How far is the launch's num_stages: a loop that says it itself
    has its look-ups pipelined too, which the next round needs at once."""
    g, d, n = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, N)
    mask = g < G
    cells = mask[:, None] & (d < D)[None, :]
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    start, stop, row, slot, first, end, c0, c1, place, alone = work
    begun = (start - c0 * H) % tl.maximum(c1 - c0, 1)  # the block of its segment that a part begins with
    head, block = (start - c0 * H) // tl.maximum(c1 - c0, 1), begun
    t = first + block * N + n
    page = tl.load(
        PAGES + slot.to(tl.int64) * pages_stride + t // PAGE, mask=(t < end) & (start < stop), other=0
    )
    high = tl.full([M], NEVER, tl.float32)
    weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
    for x in range(start, stop):
        ok = t < end
        at = page.to(tl.int64) * page_stride + (t % PAGE) * place_stride + head * head_stride
        read = ok[:, None] if D == DP else ok[:, None] & (d < D)[None, :]
        k = tl.load(K + at[:, None] + d[None, :], mask=read, other=0.0)
        v = tl.load(V + at[:, None] + d[None, :], mask=read, other=0.0)
        here = row.to(tl.int64) * q_stride + (head * G + g) * D
        q = tl.load(Q + here[:, None] + d[None, :], mask=cells, other=0.0)
        # Where the next block lies.
        row2, slot2, first2, end2, c2, c3, place2, alone2 = _segment(LIST + (place + 1) * 8)
        done = block + 1 == c1 - c0
        over = done & (head + 1 == H)
        t2 = tl.where(over, first2, first) + tl.where(done, 0, block + 1) * N + n
        there = PAGES + tl.where(over, slot2, slot).to(tl.int64) * pages_stride
        page = tl.load(there + t2 // PAGE, mask=(t2 < tl.where(over, end2, end)) & (x + 1 < stop), other=0)
        s = _scores(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=precision), scale, SOFTCAP)
        s = tl.where(ok[None, :], s, -float("inf"))
        higher = tl.maximum(high, tl.max(s, 1))
        w = tl.exp2(s - higher[:, None])
        fade = tl.exp2(high - higher)
        weight = weight * fade + tl.sum(w, 1)
        acc = tl.dot(w.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=precision)
        if done | (x + 1 == stop):
            if done & (begun == 0) & (alone == 1):
                value = _finish(higher, weight, acc, SINK, head * G + g, mask, SINKS)
                line = ((row * H + head) * G + g).to(tl.int64)
                tl.store(OUT + line[:, None] * D + d[None, :], value.to(OUT.dtype.element_ty), mask=cells)
            else:
                part = (place * H + head + tl.program_id(0)) * G + g
                _keep(VALUES, SUMS, part, higher, weight, acc, mask, D, DP)
        # From NEVER on, what was summed before fades to nothing.
        high = tl.where(done, NEVER, higher)
        begun = tl.where(done, 0, begun)
        head, block = tl.where(over, 0, head + done.to(tl.int32)), tl.where(done, 0, block + 1)
        row, slot = tl.where(over, row2, row), tl.where(over, slot2, slot)
        first, end = tl.where(over, first2, first), tl.where(over, end2, end)
        c0, c1 = tl.where(over, c2, c0), tl.where(over, c3, c1)
        place, alone, t = tl.where(over, place2, place), tl.where(over, alone2, alone), t2


@triton.jit
def _shared(
    Q, K, V, PAGES, work, LIST, SEATS, VALUES, SUMS, q_stride, pages_stride, page_stride, place_stride,
    head_stride, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's chunk of the shared runs: M places for the heads of the M // G rows of a tile."""
    pid = tl.program_id(0)
    TM: tl.constexpr = M // G
    m, d = tl.arange(0, M), tl.arange(0, DP)
    x, stop, tile, slot, first, end, c0, c1, place, _ = work
    while x < stop:
        tile2, slot2, first2, end2, c2, c3, place2, _ = _segment(LIST + (place + 1) * 8)
        blocks = c1 - c0
        head = (x - c0 * H) // blocks
        block = (x - c0 * H) % blocks
        n = tl.minimum(blocks - block, stop - x)
        begin = first + block * N
        row = tl.load(SEATS + tile * TM + m // G, mask=m // G < TM, other=-1)
        at = row.to(tl.int64) * q_stride + (head * G + m % G) * D
        mask = row >= 0
        q = tl.load(Q + at[:, None] + d[None, :], mask=mask[:, None] & (d < D)[None, :], other=0.0)
        high = tl.full([M], NEVER, tl.float32)
        high, weight, acc = _attend(
            q, high, tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32),
            K + head * head_stride, V + head * head_stride, PAGES + slot.to(tl.int64) * pages_stride,
            begin, first, tl.minimum(begin + n * N, end), m, page_stride, place_stride, scale,
            D, DP, PAGE, N, 0, SOFTCAP, False, EXACT, STAGES,
        )  # fmt: skip
        _keep(VALUES, SUMS, (place * H + head + pid) * M + m, high, weight, acc, mask, D, DP)
        x += n
        over = x >= c1 * H
        tile, slot = tl.where(over, tile2, tile), tl.where(over, slot2, slot)
        first, end = tl.where(over, first2, first), tl.where(over, end2, end)
        c0, c1 = tl.where(over, c2, c0), tl.where(over, c3, c1)
        place = tl.where(over, place2, place)


@triton.jit
def parts(
    Q, K, V, PAGES, OUT, SINK, HEAD, LIST1, DESK1, LIST2, DESK2, SEATS, VALUES1, SUMS1, VALUES2, SUMS2,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M1: tl.constexpr,
    M2: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, EXACT: tl.constexpr, STAGES1: tl.constexpr, STAGES2: tl.constexpr,
    KIND: tl.constexpr, FLAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As many programs as the plan was made for.

    KIND 0: all in one launch; 3: there are no shared runs. Or two launches whose programs share multiprocessors:
    first 2, the shared runs, then 1, the rows' own. The latter needs nothing of the former, so it waits only at its
    end, for `merge`; when it starts, all programs of the former have waited for what came before.

    The plan is read before the wait: nothing that follows its kernel starts before that has ended."""
    work = _work(HEAD, DESK1)
    work2 = _work(HEAD + 2, DESK2)
    if PDL:
        if KIND != 1:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if FLAT and (KIND == 1 or KIND == 3):
        _flat(
            Q, K, V, PAGES, OUT, SINK, work, LIST1, VALUES1, SUMS1, q_stride, pages_stride, page_stride,
            place_stride, head_stride, scale,
            H, G, D, DP, PAGE, M1, N1, SOFTCAP, SINKS, EXACT,
        )  # fmt: skip
    elif KIND == 1 or KIND == 3:
        _private(
            Q, K, V, PAGES, OUT, SINK, work, LIST1, VALUES1, SUMS1, q_stride, pages_stride, page_stride,
            place_stride, head_stride, scale,
            H, G, D, DP, PAGE, M1, N1, WINDOW, SOFTCAP, SINKS, EXACT, STAGES1,
        )  # fmt: skip
    elif KIND == 2:
        _shared(
            Q, K, V, PAGES, work2, LIST2, SEATS, VALUES2, SUMS2, q_stride, pages_stride, page_stride,
            place_stride, head_stride, scale, H, G, D, DP, PAGE, M2, N2, SOFTCAP, EXACT, STAGES2,
        )  # fmt: skip
    else:
        late = tl.program_id(0) * 2 >= tl.num_programs(0)
        for turn in range(2):
            if (turn == 1) == late:
                _shared(
                    Q, K, V, PAGES, work2, LIST2, SEATS, VALUES2, SUMS2, q_stride, pages_stride,
                    page_stride, place_stride, head_stride, scale,
                    H, G, D, DP, PAGE, M2, N2, SOFTCAP, EXACT, STAGES2,
                )  # fmt: skip
            else:
                _private(
                    Q, K, V, PAGES, OUT, SINK, work, LIST1, VALUES1, SUMS1, q_stride, pages_stride,
                    page_stride, place_stride, head_stride, scale,
                    H, G, D, DP, PAGE, M1, N1, WINDOW, SOFTCAP, SINKS, EXACT, STAGES1,
                )  # fmt: skip
    if PDL and KIND == 1:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _gather(
    high, weight, acc, VALUES, SUMS, line, step, count,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Folds `count` parts into (high, weight, acc), B at a time: part i lies at lines `line + i * step` and on."""
    i = tl.arange(0, B)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    for first in range(0, count, B):
        at = (line + (first + i) * step).to(tl.int64)[:, None] + g[None, :]  # [B, GP]
        mask = (first + i < count)[:, None] & (g < G)[None, :]
        highs = tl.load(SUMS + at * 2, mask=mask, other=NEVER)
        weights = tl.load(SUMS + at * 2 + 1, mask=mask, other=0.0)
        cells = mask[:, :, None] & (d < D)[None, None, :]
        values = tl.load(VALUES + at[:, :, None] * D + d[None, None, :], mask=cells, other=0.0)
        higher = tl.maximum(high, tl.max(highs, 0))
        fades = tl.exp2(highs - higher[None, :])
        fade = tl.exp2(high - higher)
        weight = weight * fade + tl.sum(weights * fades, 0)
        acc = acc * fade[:, None] + tl.sum(values * fades[:, :, None], 0)
        high = higher
    return high, weight, acc


@triton.jit
def merge(
    SLOTS, SHARE, HEAD, ROWS, TILES, VALUES1, SUMS1, VALUES2, SUMS2, OUT, SINK,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    S: tl.constexpr, DEPTH: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program for each (row, KV head). What is read before the wait was written before `parts` began."""
    row, head = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(HEAD + 1)
    c0, size = tl.load(ROWS + row * 4), tl.load(ROWS + row * 4 + 1)
    place, member = tl.load(ROWS + row * 4 + 2), tl.load(ROWS + row * 4 + 3)
    x = c0 * H + head * size
    p0 = x // chunk
    count = tl.where(size > 0, (x + size - 1) // chunk - p0 + 1, 0)
    if SHARED:
        slot = tl.load(SLOTS + row).to(tl.int32)
        chunk2 = tl.load(HEAD + 3)
        depth = tl.load(SHARE + 16 + S + slot, mask=member == 1, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (count > 1) | (member == 1):
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        high = tl.full([GP], NEVER, tl.float32)
        weight = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, DP], tl.float32)
        if SHARED:
            TM: tl.constexpr = M // G
            for i in range(0, depth):
                seat = tl.load(SHARE + 16 + 2 * S + slot * DEPTH + i)
                tile = TILES + seat // TM * 4
                c2, size2, place2 = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
                x2 = c2 * H + head * size2
                p2 = x2 // chunk2
                line = (place2 * H + head + p2) * M + seat % TM * G
                high, weight, acc = _gather(
                    high, weight, acc, VALUES2, SUMS2, line, M, (x2 + size2 - 1) // chunk2 - p2 + 1,
                    D, DP, GP, G, B,
                )  # fmt: skip
        line = (place * H + head + p0) * G
        high, weight, acc = _gather(high, weight, acc, VALUES1, SUMS1, line, G, count, D, DP, GP, G, B)
        mask = g < G
        value = _finish(high, weight, acc, SINK, head * G + g, mask, SINKS)
        at = ((row * H + head) * G + g).to(tl.int64)[:, None] * D + d[None, :]
        tl.store(OUT + at, value.to(OUT.dtype.element_ty), mask=mask[:, None] & (d < D)[None, :])


@triton.jit
def prompts(
    Q, K, V, PAGES, OUT, SINK, SLOTS, STARTS, LENGTHS, HEAD, LIST,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program for each (KV head, tile of M // G tokens of a row); the last tiles, which see most, first."""
    tiles = tl.load(HEAD + 4)
    item = tiles - 1 - tl.program_id(1)
    if item >= 0:
        head = tl.program_id(0)
        row, tile = tl.load(LIST + item * 2), tl.load(LIST + item * 2 + 1)
        TM: tl.constexpr = M // G
        start = tl.load(STARTS + row).to(tl.int32)
        count = tl.load(STARTS + row + 1).to(tl.int32) - start
        length = tl.load(LENGTHS + row).to(tl.int32)
        slot = tl.load(SLOTS + row).to(tl.int64)
        m, d = tl.arange(0, M), tl.arange(0, DP)
        token = tile * TM + m // G
        mask = (m // G < TM) & (token < count)
        cells = mask[:, None] & (d < D)[None, :]
        heads = head * G + m % G
        at = (start + token).to(tl.int64) * q_stride + heads * D
        q = tl.load(Q + at[:, None] + d[None, :], mask=cells, other=0.0)
        before = length - count + tile * TM  # position of the tile's first token
        edge = length - count + token
        end = tl.minimum(before + TM, length)
        low = tl.maximum(before - WINDOW + 1, 0) if WINDOW > 0 else 0
        begin = low // N * N
        # Blocks that all queries see whole need no edge.
        clear = begin if WINDOW > 0 else (before + 1) // N * N
        high = tl.full([M], NEVER, tl.float32)
        weight = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        K += head * head_stride
        V += head * head_stride
        PAGES += slot * pages_stride
        if WINDOW == 0:
            high, weight, acc = _attend(
                q, high, weight, acc, K, V, PAGES, 0, 0, clear, edge, page_stride, place_stride, scale,
                D, DP, PAGE, N, WINDOW, SOFTCAP, False, EXACT, STAGES,
            )  # fmt: skip
        high, weight, acc = _attend(
            q, high, weight, acc, K, V, PAGES, clear, low, end, edge, page_stride, place_stride, scale,
            D, DP, PAGE, N, WINDOW, SOFTCAP, True, EXACT, STAGES,
        )  # fmt: skip
        value = _finish(high, weight, acc, SINK, heads, mask, SINKS)
        line = (start + token).to(tl.int64) * (H * G) + heads
        tl.store(OUT + line[:, None] * D + d[None, :], value.to(OUT.dtype.element_ty), mask=cells)


def samples() -> list[Sample]:
    return [
        _parts(),
        _parts(HD=256, N=32),
        _parts(kv="*fp8e4nv"),
        _parts(kind=1),
        _parts(kind=3, flat=True),
        *_others(),
    ]


def _read(kv: str, HD: int) -> tuple[dict[str, str], dict[str, object]]:
    types = dict.fromkeys(("Q", "OUT", "SINK"), "*bf16") | {
        "K": kv,
        "V": kv,
        "PAGES": "*i32",
        "scale": "fp32",
    }
    types |= dict.fromkeys(("q_stride", "pages_stride", "page_stride", "place_stride", "head_stride"), "i32")
    shape = {"H": 8, "G": 4, "D": HD, "DP": HD, "PAGE": 16, "WINDOW": 0, "SOFTCAP": 0.0, "SINKS": False}
    return types, shape | {"EXACT": False}


def _parts(kv: str = "*bf16", HD: int = 128, N: int = 64, kind: int = 0, flat: bool = False) -> Sample:
    types, constants = _read(kv, HD)
    tables = ("HEAD", "LIST1", "DESK1", "LIST2", "DESK2", "SEATS")
    types |= dict.fromkeys(tables, "*i32") | dict.fromkeys(("VALUES1", "SUMS1", "VALUES2", "SUMS2"), "*fp32")
    constants |= {
        "M1": 16,
        "M2": 64,
        "N1": N,
        "N2": N,
        "KIND": kind,
        "FLAT": flat,
    }
    constants |= {"STAGES1": 2, "STAGES2": 2}
    targets = tuple(t for t in TARGETS if kv == "*bf16" or t[1] in (90, 100))  # older ones have other fp8
    return Sample(parts, types, constants, {"num_warps": 4}, targets)


def _others() -> list[Sample]:
    types, constants = _read("*bf16", 128)
    types |= dict.fromkeys(("SLOTS", "STARTS", "LENGTHS", "HEAD", "LIST"), "*i32")
    tile = {"M": 64, "N": 64, "STAGES": 2}
    tables = dict.fromkeys(("SLOTS", "SHARE", "HEAD", "ROWS", "TILES"), "*i32")
    parts = dict.fromkeys(("VALUES1", "SUMS1", "VALUES2", "SUMS2"), "*fp32")
    shape = {"H": 8, "G": 4, "GP": 4, "D": 128, "DP": 128, "M": 64, "S": 257, "DEPTH": 8, "SINKS": False}
    return [
        Sample(prompts, types, constants | tile, {"num_warps": 4}),
        Sample(merge, tables | parts | {"OUT": "*bf16", "SINK": "*bf16"}, shape | {"SHARED": True, "B": 4}),
    ]
