"""Attention over paged KV: decoding rows through the radix tree, and prompts.

Programs walk a line of blocks (see plan.py), each over its own chunk of it. `shared_runs` attends over what many
rows share, for all of them at once, and keeps every part in float32, unnormalized, with its maximum and sum.
`singles` attends over what is a row's own and writes the row, with its shared parts if it has any. What is cut over
several programs, here and in `prompts`, is merged by the last of them to finish, in the order of positions: so
no bit depends on which that is.

Softmax is of base 2. A masked score is minus infinity; a maximum never falls under NEVER, so no difference of
infinities arises. Queries of a tile: place m is row m // G of the tile, head m % G of the KV head.
"""

# pyright: reportAttributeAccessIssue=false
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
def _attend_whole(
    q, high, weight, acc, K, V, PAGES, column, begin, end, scale,
    PAGE: tl.constexpr, N: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same over whole blocks, none of which goes over the end of a page, and all of whose positions are seen: the
    hardware copies them. K and V: descriptors of blocks [N, D] of the store as [places, H * D]."""
    page = tl.load(PAGES + begin // PAGE, mask=begin < end, other=0)
    for p in tl.range(begin, end, N, num_stages=STAGES):
        at = (page * PAGE + p % PAGE).to(tl.int32)
        k, v = K.load([at, column]), V.load([at, column])
        page = tl.load(PAGES + (p + N) // PAGE, mask=p + N < end, other=0)
        s = tl.dot(q, tl.trans(k))
        if SOFTCAP > 0.0:
            s = _scores(s, scale, SOFTCAP)
            higher = tl.maximum(high, tl.max(s, 1))
            w = tl.exp2(s - higher[:, None])
        else:  # the scale is above 0
            higher = tl.maximum(high, tl.max(s, 1) * scale)
            w = tl.exp2(s * scale - higher[:, None])
        fade = tl.exp2(high - higher)
        weight = weight * fade + tl.sum(w, 1)
        acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None])
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
def _fold(high, weight, acc, high2, weight2, acc2):
    """The second behind the first. What is empty changes no bit of the other."""
    higher = tl.maximum(high, high2)
    fade, fade2 = tl.exp2(high - higher), tl.exp2(high2 - higher)
    return higher, weight * fade + weight2 * fade2, acc * fade[:, None] + acc2 * fade2[:, None]


@triton.jit
def _narrow(high, weight, acc, mask, M: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr):
    """The first GP of M places: products need 16, a row has fewer heads."""
    if GP < M:
        high = tl.max(tl.reshape(tl.where(mask, high, NEVER), [M // GP, GP]), 0)
        weight = tl.sum(tl.reshape(tl.where(mask, weight, 0.0), [M // GP, GP]), 0)
        acc = tl.sum(tl.reshape(tl.where(mask[:, None], acc, 0.0), [M // GP, GP, DP]), 0)
    return high, weight, acc


@triton.jit
def _gather(
    high, weight, acc, VALUES, SUMS, line, step, count,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Folds `count` parts into (high, weight, acc), B at a time: part i lies at lines `line + i * step` and on. They
    are read past the first-level cache, which knows nothing of other programs."""
    i = tl.arange(0, B)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    for first in range(0, count, B):
        at = (line + (first + i) * step).to(tl.int64)[:, None] + g[None, :]  # [B, GP]
        mask = (first + i < count)[:, None] & (g < G)[None, :]
        cells = mask[:, :, None] & (d < D)[None, None, :]
        values = tl.load(
            VALUES + at[:, :, None] * D + d[None, None, :], mask=cells, other=0.0, cache_modifier=".cg"
        )
        highs = tl.load(SUMS + at * 2, mask=mask, other=NEVER, cache_modifier=".cg")
        weights = tl.load(SUMS + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(high, tl.max(highs, 0))
        fades = tl.exp2(highs - higher[None, :])
        fade = tl.exp2(high - higher)
        weight = weight * fade + tl.sum(weights * fades, 0)
        acc = acc * fade[:, None] + tl.sum(values * fades[:, :, None], 0)
        high = higher
    return high, weight, acc


@triton.jit
def _segment(ENTRY):
    return (
        tl.load(ENTRY), tl.load(ENTRY + 1), tl.load(ENTRY + 2), tl.load(ENTRY + 3),
        tl.load(ENTRY + 4), tl.load(ENTRY + 5), tl.load(ENTRY + 6), tl.load(ENTRY + 7),
    )  # fmt: skip


@triton.jit
def _last(COUNT, parts):
    """Whether all other parts are there. Every write of this program comes before."""
    tl.debug_barrier()
    last = tl.atomic_add(COUNT, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(COUNT, 0)
    return last


@triton.jit
def _settle(
    high, weight, acc, mask, n, blocks, x, chunk, line, row, head, depth, OUT, SINK, CHAIN, COUNTS, VALUES1, SUMS1,
    VALUES2, SUMS2, chunk2, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    M: tl.constexpr, GP: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, M2: tl.constexpr,
    DEPTH: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What one program found over `n` of a head's blocks, which begin at x: keeps it, or writes the row's heads."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    entry = CHAIN + row * (DEPTH * 4)
    if SHARED:
        c2, size2, place2, seat = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    high, weight, acc = _narrow(high, weight, acc, mask, M, GP, DP)
    whole = n == blocks
    if n < blocks:
        _keep(VALUES1, SUMS1, (line + tl.program_id(0)) * G + g, high, weight, acc, g < G, D, DP)
        program = x // chunk
        count = (x + blocks - 1) // chunk - program + 1
        whole = _last(COUNTS + line, count)
        if whole:
            high, weight = tl.full([GP], NEVER, tl.float32), tl.zeros([GP], tl.float32)
            acc = tl.zeros([GP, DP], tl.float32)
            high, weight, acc = _gather(
                high, weight, acc, VALUES1, SUMS1, (line + program) * G, G, count, D, DP, GP, G, B
            )
    if whole:
        if SHARED:
            if PDL:
                tl.extra.cuda.gdc_wait()  # for the shared runs
            for _ in range(0, depth):
                entry += 4  # the next one is asked for ahead: behind the last lies one that is not used
                x2 = c2 * H + head * size2
                first = x2 // chunk2
                parts, at = (
                    (x2 + size2 - 1) // chunk2 - first + 1,
                    (place2 * H + head + first) * M2 + seat * G,
                )
                c2, size2, place2, seat = (
                    tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
                )  # fmt: skip
                high, weight, acc = _gather(high, weight, acc, VALUES2, SUMS2, at, M2, parts, D, DP, GP, G, B)
        value = _finish(high, weight, acc, SINK, head * G + g, g < G, SINKS)
        to = ((row * H + head) * G + g).to(tl.int64)[:, None] * D + d[None, :]
        tl.store(OUT + to, value.to(OUT.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def singles(
    Q, K, V, PAGES, OUT, SINK, HEAD, LIST, DESK, CHAIN, COUNTS, VALUES1, SUMS1, VALUES2, SUMS2,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    GP: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, M2: tl.constexpr, DEPTH: tl.constexpr,
    B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one token, over their own positions: as many programs as the plan was made for, M places for one row's
    G heads. COUNTS [rows * H] are zeros, before and after.

    SHARED: `shared_runs` came before, and may still run. All its programs have waited for what came before them
    when this starts, and nothing of theirs is needed until a row is written: so that is where this waits.
    The plan is read before the wait: nothing that follows its kernel starts before that has ended."""
    pid = tl.program_id(0)
    total, chunk, chunk2 = tl.load(HEAD), tl.load(HEAD + 1), tl.load(HEAD + 3)
    x = pid * chunk
    stop = tl.minimum(x + chunk, total)
    row, slot, first, end, c0, c1, place, depth = _segment(DESK + pid * 8)
    if PDL:
        if not SHARED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g, d = tl.arange(0, M), tl.arange(0, DP)
    mask = g < G
    while x < stop:
        # The next segment's numbers are asked for before this one's long loop.
        row2, slot2, first2, end2, c2, c3, place2, depth2 = _segment(LIST + (place + 1) * 8)
        blocks = c1 - c0
        head = (x - c0 * H) // blocks
        block = (x - c0 * H) % blocks
        n = tl.minimum(blocks - block, stop - x)
        begin = first + block * N
        at = row.to(tl.int64) * q_stride + (head * G + g) * D
        q = tl.load(Q + at[:, None] + d[None, :], mask=mask[:, None] & (d < D)[None, :], other=0.0)
        high = tl.full([M], NEVER, tl.float32)
        high, weight, acc = _attend(
            q, high, tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32),
            K + head * head_stride, V + head * head_stride, PAGES + slot.to(tl.int64) * pages_stride,
            begin, first, tl.minimum(begin + n * N, end), g, page_stride, place_stride, scale,
            D, DP, PAGE, N, WINDOW, SOFTCAP, False, EXACT, STAGES,
        )  # fmt: skip
        _settle(
            high, weight, acc, mask, n, blocks, x - block, chunk, place * H + head, row, head, depth, OUT, SINK,
            CHAIN, COUNTS, VALUES1, SUMS1, VALUES2, SUMS2, chunk2,
            H, G, D, DP, M, GP, SINKS, SHARED, M2, DEPTH, B, PDL,
        )  # fmt: skip
        x += n
        over = x >= c1 * H
        row, slot = tl.where(over, row2, row), tl.where(over, slot2, slot)
        first, end = tl.where(over, first2, first), tl.where(over, end2, end)
        c0, c1 = tl.where(over, c2, c0), tl.where(over, c3, c1)
        place, depth = tl.where(over, place2, place), tl.where(over, depth2, depth)
    if PDL and SHARED:
        tl.extra.cuda.gdc_wait()  # whoever had nothing to write, too: what follows relies on all of them


@triton.jit
def shared_runs(
    Q, K, V, KTILES, VTILES, PAGES, HEAD, LIST, DESK, SEATS, VALUES, SUMS, q_stride, pages_stride, page_stride, place_stride,
    head_stride, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
    COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Shared runs: as many programs as the plan was made for, M places for the heads of a tile's M // G rows.

    COPIES: blocks fill pages evenly, and the hardware copies them."""
    pid = tl.program_id(0)
    total, chunk = tl.load(HEAD + 2), tl.load(HEAD + 3)
    x = pid * chunk
    stop = tl.minimum(x + chunk, total)
    tile, slot, first, end, c0, c1, place, _ = _segment(DESK + pid * 8)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TM: tl.constexpr = M // G
    m, d = tl.arange(0, M), tl.arange(0, DP)
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
        weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
        pages, stop2 = PAGES + slot.to(tl.int64) * pages_stride, tl.minimum(begin + n * N, end)
        if COPIES:
            high, weight, acc = _attend_whole(
                q, high, weight, acc, KTILES, VTILES, pages, head * D, begin, stop2, scale, PAGE, N, SOFTCAP, STAGES
            )  # fmt: skip
        else:
            high, weight, acc = _attend(
                q, high, weight, acc, K + head * head_stride, V + head * head_stride, pages, begin, first, stop2, m,
                page_stride, place_stride, scale, D, DP, PAGE, N, 0, SOFTCAP, False, EXACT, STAGES,
            )  # fmt: skip
        _keep(VALUES, SUMS, (place * H + head + pid) * M + m, high, weight, acc, mask, D, DP)
        x += n
        over = x >= c1 * H
        tile, slot = tl.where(over, tile2, tile), tl.where(over, slot2, slot)
        first, end = tl.where(over, first2, first), tl.where(over, end2, end)
        c0, c1 = tl.where(over, c2, c0), tl.where(over, c3, c1)
        place = tl.where(over, place2, place)


@triton.jit
def _last_prompt(
    high, weight, acc, mask, line, COUNTS, VALUES, SUMS, cut, cuts, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Keeps a tile's part number `cut`; with the last one of them all, what they amount to."""
    m, d = tl.arange(0, M), tl.arange(0, DP)
    _keep(VALUES, SUMS, (line * cuts + cut) * M + m, high, weight, acc, mask, D, DP)
    last = _last(COUNTS + line, cuts)
    if last:
        high, weight = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for i in range(0, cuts):
            at = ((line * cuts + i) * M + m).to(tl.int64)
            high2 = tl.load(SUMS + at * 2, mask=mask, other=NEVER, cache_modifier=".cg")
            weight2 = tl.load(SUMS + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
            cells = mask[:, None] & (d < D)[None, :]
            acc2 = tl.load(VALUES + at[:, None] * D + d[None, :], mask=cells, other=0.0, cache_modifier=".cg")
            high, weight, acc = _fold(high, weight, acc, high2, weight2, acc2)
    return last, high, weight, acc


@triton.jit
def prompts(
    Q, K, V, KTILES, VTILES, PAGES, OUT, SINK, SLOTS, STARTS, LENGTHS, HEAD, LIST, COUNTS, VALUES, SUMS,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale, cuts,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """A program for each (KV head, tile of M // G tokens of a row); the last tiles, which see most, first.

    SPLIT: `cuts` of them, each for its part of the positions; COUNTS [tiles * H] are zeros, before and after."""
    item = tl.load(HEAD + 4) - 1 - tl.program_id(1)
    if item >= 0:
        head, cut = tl.program_id(0), tl.program_id(2)
        row, tile = tl.load(LIST + item * 2), tl.load(LIST + item * 2 + 1)
        TM: tl.constexpr = M // G
        start = tl.load(STARTS + row).to(tl.int32)
        count = tl.load(STARTS + row + 1).to(tl.int32) - start
        done = tl.load(LENGTHS + row).to(tl.int32) - count
        PAGES += tl.load(SLOTS + row).to(tl.int64) * pages_stride
        m, d = tl.arange(0, M), tl.arange(0, DP)
        token = tile * TM + m // G
        mask = (m // G < TM) & (token < count)
        cells = mask[:, None] & (d < D)[None, :]
        heads = head * G + m % G
        at = (start + token).to(tl.int64) * q_stride + heads * D
        q = tl.load(Q + at[:, None] + d[None, :], mask=cells, other=0.0)
        before, edge = done + tile * TM, done + token  # positions: of the tile's first token; of each
        end = tl.minimum(before + TM, done + count)
        low = tl.maximum(before - WINDOW + 1, 0) if WINDOW > 0 else 0
        begin = low // N * N
        if SPLIT:
            size = tl.cdiv(tl.cdiv(end - begin, N), cuts) * N
            begin += cut * size
            end = tl.minimum(begin + size, end)
        # Blocks that all queries see whole need no edge.
        clear = begin if WINDOW > 0 else tl.maximum(tl.minimum((before + 1) // N * N, end), begin)
        high = tl.full([M], NEVER, tl.float32)
        weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
        K, V = K + head * head_stride, V + head * head_stride
        if COPIES and WINDOW == 0:
            high, weight, acc = _attend_whole(
                q, high, weight, acc, KTILES, VTILES, PAGES, head * D, begin, clear, scale, PAGE, N, SOFTCAP, STAGES
            )  # fmt: skip
        elif WINDOW == 0:
            high, weight, acc = _attend(
                q, high, weight, acc, K, V, PAGES, begin, 0, clear, edge, page_stride, place_stride, scale,
                D, DP, PAGE, N, WINDOW, SOFTCAP, False, EXACT, STAGES,
            )  # fmt: skip
        high, weight, acc = _attend(
            q, high, weight, acc, K, V, PAGES, clear, low, end, edge, page_stride, place_stride, scale,
            D, DP, PAGE, N, WINDOW, SOFTCAP, True, EXACT, STAGES,
        )  # fmt: skip
        if SPLIT:
            last, high, weight, acc = _last_prompt(
                high, weight, acc, mask, item * H + head, COUNTS, VALUES, SUMS, cut, cuts, M, D, DP
            )
            cells = cells & last
        value = _finish(high, weight, acc, SINK, heads, mask, SINKS)
        at = ((start + token).to(tl.int64) * (H * G) + heads) * D
        tl.store(OUT + at[:, None] + d[None, :], value.to(OUT.dtype.element_ty), mask=cells)


def samples() -> list[Sample]:
    return [
        _singles(),
        _singles(HD=256, N=32),
        _singles(kv="*fp8e4nv"),
        _singles(shared=False),
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


def _singles(kv: str = "*bf16", HD: int = 128, N: int = 64, shared: bool = True) -> Sample:
    types, constants = _read(kv, HD)
    types |= dict.fromkeys(("HEAD", "LIST", "DESK", "CHAIN", "COUNTS"), "*i32")
    types |= dict.fromkeys(("VALUES1", "SUMS1", "VALUES2", "SUMS2"), "*fp32")
    constants |= {"M": 16, "GP": 4, "N": N, "STAGES": 2, "SHARED": shared, "M2": 64, "DEPTH": 8, "B": 4}
    targets = tuple(t for t in TARGETS if kv == "*bf16" or t[1] in (90, 100))  # older ones have other fp8
    return Sample(singles, types, constants, {"num_warps": 4}, targets)


def _others() -> list[Sample]:
    types, constants = _read("*bf16", 128)
    parts = dict.fromkeys(("VALUES", "SUMS"), "*fp32")
    tile = {"M": 64, "N": 64, "STAGES": 2}
    tables = dict.fromkeys(("SLOTS", "STARTS", "LENGTHS", "HEAD", "LIST", "COUNTS"), "*i32")
    tables2 = dict.fromkeys(("HEAD", "LIST", "DESK", "SEATS"), "*i32")
    types2 = {name: kind for name, kind in types.items() if name not in ("OUT", "SINK")}
    shape = {name: value for name, value in constants.items() if name not in ("SINKS", "WINDOW")}
    shape |= tile | {"COPIES": False}
    tiles = dict.fromkeys(("KTILES", "VTILES"), "*bf16")
    copied = dict.fromkeys(("KTILES", "VTILES"), "tensordesc<bf16[64, 128]>")
    copies = {"PAGE": 64, "COPIES": True}
    newer = tuple(t for t in TARGETS if t[1] in (90, 100))
    types |= tables | parts | {"cuts": "i32"}
    types2 |= tables2 | parts
    constants |= tile | {"SPLIT": True, "COPIES": False}
    plain = {"num_warps": 4}
    return [
        Sample(shared_runs, types2 | tiles, shape, plain),
        Sample(shared_runs, types2 | copied, shape | copies, plain, newer),
        Sample(prompts, types | tiles, constants | {"SPLIT": False}, plain),
        Sample(prompts, types | tiles, constants, plain),
        Sample(prompts, types | copied, constants | copies, plain, newer),
    ]
