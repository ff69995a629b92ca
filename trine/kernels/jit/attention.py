"""Attention over paged KV: rows of one token through the radix tree, and what all attention kernels are made of.

Programs walk a line of blocks (see plan.py), each over its own chunk of it. `shared_runs` attends over what many
rows share, for all of them at once, and `singles` over what is a row's own; both keep every part in float32,
unnormalized, with its maximum and sum. `merge` writes the rows from these.

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
def _attend_copied(
    q, high, weight, acc, K, V, PAGES, column, begin, low, end, scale,
    PAGE: tl.constexpr, N: tl.constexpr, SOFTCAP: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same over blocks none of which goes over the end of a page: the hardware copies them. K and V: descriptors
    of blocks [N, D] of the store as [places, H * D].

    EDGES: 0, all blocks are seen whole; 1, but for what is behind the end; 2, and for what is before `low`. That
    counts 0 times, so it must be finite (see `kernels.fused` and `runtime.store`)."""
    page = tl.load(PAGES + begin // PAGE, mask=begin < end, other=0)
    for p in tl.range(begin, end, N, num_stages=STAGES):
        at = (page * PAGE + p % PAGE).to(tl.int32)
        k, v = K.load([at, column]), V.load([at, column])
        page = tl.load(PAGES + (p + N) // PAGE, mask=p + N < end, other=0)
        s = tl.dot(q, tl.trans(k))
        if SOFTCAP > 0.0:
            s = _scores(s, scale, SOFTCAP)
        if EDGES > 0:
            t = p + tl.arange(0, N)
            seen = (t < end) & (t >= low) if EDGES > 1 else t < end
            s = tl.where(seen[None, :], s, -float("inf"))
        if SOFTCAP > 0.0:
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
def _fold_shared(
    high, weight, acc, CHAIN, HEAD, VALUES, SUMS, row, head, depth, H: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, DEPTH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Folds in what `shared_runs` kept for a row: `depth` runs. Who calls has waited for it."""
    chunk = tl.load(HEAD + 3)
    entry = CHAIN + row * (DEPTH * 4)
    for _ in range(0, depth):
        size, place, seat = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        x = tl.load(entry) * H + head * size
        first = x // chunk
        parts, line = (x + size - 1) // chunk - first + 1, (place * H + head + first) * M + seat * G
        high, weight, acc = _gather(high, weight, acc, VALUES, SUMS, line, M, parts, D, DP, GP, G, B)
        entry += 4
    return high, weight, acc


@triton.jit
def singles(
    Q, K, V, PAGES, HEAD, LIST, DESK, VALUES, SUMS,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    GP: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one token, over their own positions: as many programs as the plan was made for, M places for one row's
    G heads.

    SHARED: `shared_runs` came before, and may still run. All its programs have waited for what came before them
    when this starts, and nothing here needs theirs: this waits for it at its end, for the sake of what follows.
    The plan is read before the wait: nothing that follows its kernel starts before that has ended."""
    pid = tl.program_id(0)
    total, chunk = tl.load(HEAD), tl.load(HEAD + 1)
    x = pid * chunk
    stop = tl.minimum(x + chunk, total)
    row, slot, first, end, c0, c1, place, _ = _segment(DESK + pid * 8)
    if PDL:
        if not SHARED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g, d = tl.arange(0, M), tl.arange(0, DP)
    mask = g < G
    while x < stop:
        # The next segment's numbers are asked for before this one's long loop.
        row2, slot2, first2, end2, c2, c3, place2, _ = _segment(LIST + (place + 1) * 8)
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
        high, weight, acc = _narrow(high, weight, acc, mask, M, GP, DP)
        few = tl.arange(0, GP)
        _keep(VALUES, SUMS, (place * H + head + pid) * G + few, high, weight, acc, few < G, D, DP)
        x += n
        over = x >= c1 * H
        row, slot = tl.where(over, row2, row), tl.where(over, slot2, slot)
        first, end = tl.where(over, first2, first), tl.where(over, end2, end)
        c0, c1 = tl.where(over, c2, c0), tl.where(over, c3, c1)
        place = tl.where(over, place2, place)
    if PDL and SHARED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def merge(
    HEAD, ROWS, CHAIN, VALUES1, SUMS1, VALUES2, SUMS2, OUT, SINK,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, SINKS: tl.constexpr,
    SHARED: tl.constexpr, M2: tl.constexpr, DEPTH: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each (row, KV head): what `shared_runs` kept for the row, then what `singles` did."""
    row, head = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(HEAD + 1)
    entry = ROWS + row * 4
    size, place, depth = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    x = tl.load(entry) * H + head * size
    first = x // chunk
    parts = tl.where(size > 0, (x + size - 1) // chunk - first + 1, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    high, weight = tl.full([GP], NEVER, tl.float32), tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    if SHARED:
        high, weight, acc = _fold_shared(
            high, weight, acc, CHAIN, HEAD, VALUES2, SUMS2, row, head, depth, H, G, D, DP, GP, M2, DEPTH, B
        )
    line = (place * H + head + first) * G
    high, weight, acc = _gather(high, weight, acc, VALUES1, SUMS1, line, G, parts, D, DP, GP, G, B)
    value = _finish(high, weight, acc, SINK, head * G + g, g < G, SINKS)
    to = ((row * H + head) * G + g).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(OUT + to, value.to(OUT.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


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
            high, weight, acc = _attend_copied(
                q, high, weight, acc, KTILES, VTILES, pages, head * D, begin, first, stop2, scale, PAGE, N, SOFTCAP, 0, STAGES
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


def samples() -> list[Sample]:
    return [
        _singles(),
        _singles(HD=256, N=32),
        _singles(kv="*fp8e4nv"),
        _singles(shared=False),
        _merge(shared=True),
        _merge(shared=False),
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
    types = {name: kind for name, kind in types.items() if name not in ("OUT", "SINK")}
    constants = {name: value for name, value in constants.items() if name != "SINKS"}
    types |= dict.fromkeys(("HEAD", "LIST", "DESK"), "*i32") | dict.fromkeys(("VALUES", "SUMS"), "*fp32")
    constants |= {"M": 16, "GP": 4, "N": N, "STAGES": 2, "SHARED": shared}
    targets = tuple(t for t in TARGETS if kv == "*bf16" or t[1] in (90, 100))  # older ones have other fp8
    return Sample(singles, types, constants, {"num_warps": 4}, targets)


def _merge(shared: bool) -> Sample:
    types = dict.fromkeys(("HEAD", "ROWS", "CHAIN"), "*i32") | dict.fromkeys(("OUT", "SINK"), "*bf16")
    types |= dict.fromkeys(("VALUES1", "SUMS1", "VALUES2", "SUMS2"), "*fp32")
    constants = {"H": 8, "G": 4, "D": 128, "DP": 128, "GP": 4, "SINKS": False}
    constants |= {"SHARED": shared, "M2": 64, "DEPTH": 8, "B": 4}
    return Sample(merge, types, constants, {"num_warps": 4})


def _others() -> list[Sample]:
    types, constants = _read("*bf16", 128)
    types = {name: kind for name, kind in types.items() if name not in ("OUT", "SINK")}
    types |= dict.fromkeys(("HEAD", "LIST", "DESK", "SEATS"), "*i32") | dict.fromkeys(
        ("VALUES", "SUMS"), "*fp32"
    )
    shape = {name: value for name, value in constants.items() if name not in ("SINKS", "WINDOW")}
    shape |= {"M": 64, "N": 64, "STAGES": 2, "COPIES": False}
    tiles = dict.fromkeys(("KTILES", "VTILES"), "*bf16")
    copied = dict.fromkeys(("KTILES", "VTILES"), "tensordesc<bf16[64, 128]>")
    newer = tuple(t for t in TARGETS if t[1] in (90, 100))
    plain = {"num_warps": 4}
    return [
        Sample(shared_runs, types | tiles, shape, plain),
        Sample(shared_runs, types | copied, shape | {"PAGE": 64, "COPIES": True}, plain, newer),
    ]
