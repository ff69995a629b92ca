"""Y = X W^T on tensor cores, W read once: for few rows, and for any number with the same bits.

Sums over the inputs are made in SEGMENTS, each one behind the other, and the sums of segments are added in
their order. Segments of a tile may be the work of one program, or (SPLIT) of several: then each writes its
sums to PART, and whichever is last adds them up. The order is the same, so the bits are. W is the left operand
of the product, since 64 of its rows always exist: so 16 rows of X need not fill 64.
"""

import triton
import triton.language as tl

from . import Sample
from .fused import activate


@triton.jit
def outputs(tile, OUTS: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr):
    """[BN]: rows of W that a tile multiplies by. With a gate: half of them gates, then their ups."""
    i = tl.arange(0, BN)
    if GATE == "":
        n = tl.minimum(tile * BN + i, OUTS - 1)
    else:
        n = tl.minimum(tile * (BN // 2) + i % (BN // 2), OUTS - 1) + i // (BN // 2) * OUTS
    return n


@triton.jit
def segment(
    X, W, m, n, index, rows, INS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """[BN, BM] float32: the sums over inputs index * LENGTH and on."""
    k = index * LENGTH + tl.arange(0, BK)
    w = W + n.to(tl.int64)[:, None] * INS + k[None, :]
    x = X + m.to(tl.int64)[None, :] * INS + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(0, LENGTH, BK):
        if INS % LENGTH == 0 and LENGTH % BK == 0:
            a = tl.load(w)
            b = tl.load(x, mask=m[None, :] < rows, other=0.0)
        else:
            inside = k + start < INS
            a = tl.load(w, mask=inside[None, :], other=0.0)
            b = tl.load(x, mask=inside[:, None] & (m[None, :] < rows), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        w += BK
        x += BK
    return acc


@triton.jit
def finish(Y, R, acc, tile, m, rows, OUTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """What stands behind a product, rounded to the dtype of Y wherever separate kernels would have stored it."""
    if GATE != "":
        both = acc.to(Y.dtype.element_ty).to(tl.float32).reshape(2, BN // 2, BM).permute(1, 2, 0)
        gate, up = tl.split(both)
        y = (activate(gate, GATE) * up).to(Y.dtype.element_ty)
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
    else:
        y = acc.to(Y.dtype.element_ty)
        n = tile * BN + tl.arange(0, BN)
    ok = (n[:, None] < OUTS) & (m[None, :] < rows)
    at = m.to(tl.int64)[None, :] * OUTS + n[:, None]
    if ADD:
        y = (y.to(tl.float32) + tl.load(R + at, mask=ok, other=0.0).to(tl.float32)).to(Y.dtype.element_ty)
    tl.store(Y + at, y, mask=ok)


@triton.jit
def total(parts, i, SEGMENTS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """The sums of all segments, past the first-level cache, which knows nothing of other programs."""
    acc = tl.load(parts + i, cache_modifier=".cg")
    for s in range(1, SEGMENTS):
        acc += tl.load(parts + s * (BN * BM) + i, cache_modifier=".cg")
    return acc


@triton.jit
def ahead(W, n, index, INS: tl.constexpr, LENGTH: tl.constexpr, BYTES: tl.constexpr):
    """Bring the first bytes of each of a tile's rows of W to the L2 cache. (sm_90)"""
    at = (W + n.to(tl.int64) * INS + index * LENGTH).to(tl.int64)
    size = at * 0 + BYTES
    tl.inline_asm_elementwise(
        "cvt.u32.u64 $0, $2; cp.async.bulk.prefetch.L2.global [$1], $0;", "=r,l,l", [at, size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def product(
    X, W, Y, R, PART, COUNT, rows, OUTS: tl.constexpr, INS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, GATE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BN outputs (TILES of them) and BM rows. PART [tiles, SEGMENTS, BN, BM], COUNT [tiles]: zeros,
    before and after. AHEAD: bytes of each row of W to fetch before the wait. GROUP tiles of rows run together,
    so that the parts of W and X that they share stay in the cache."""
    programs: tl.constexpr = SEGMENTS if SPLIT else 1  # of a tile
    pid, index = tl.program_id(0) // programs, tl.program_id(0) % programs
    above = pid // (GROUP * TILES) * GROUP
    size = tl.minimum(tl.cdiv(rows, BM) - above, GROUP)
    tile_m, tile = above + pid % (GROUP * TILES) % size, pid % (GROUP * TILES) // size
    LENGTH: tl.constexpr = (INS + SEGMENTS * BK - 1) // (SEGMENTS * BK) * BK
    m, n = tile_m * BM + tl.arange(0, BM), outputs(tile, OUTS, BN, GATE)
    if PDL:
        if AHEAD > 0:
            ahead(W, n, index, INS, LENGTH, AHEAD)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = segment(X, W, m, n, index, rows, INS, BM, BN, BK, LENGTH)
    if SPLIT:
        i = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        parts = PART + pid.to(tl.int64) * (SEGMENTS * BN * BM)
        tl.store(parts + index * (BN * BM) + i, acc)
        tl.debug_barrier()  # all of the program's sums are written before it counts as done
        if tl.atomic_add(COUNT + pid, 1, sem="acq_rel", scope="gpu") == SEGMENTS - 1:
            finish(Y, R, total(parts, i, SEGMENTS, BN, BM), tile, m, rows, OUTS, BM, BN, ADD, GATE)
            tl.store(COUNT + pid, 0)
    else:
        for s in range(1, SEGMENTS):
            acc += segment(X, W, m, n, s, rows, INS, BM, BN, BK, LENGTH)
        finish(Y, R, acc, tile, m, rows, OUTS, BM, BN, ADD, GATE)


def samples() -> list[Sample]:
    types = {
        "X": "*bf16",
        "W": "*bf16",
        "Y": "*bf16",
        "R": "*bf16",
        "PART": "*fp32",
        "COUNT": "*i32",
        "rows": "i32",
    }
    plain = {"GROUP": 8, "ADD": False, "GATE": "", "AHEAD": 0}
    down = {
        "OUTS": 4096,
        "INS": 14336,
        "BM": 64,
        "BN": 128,
        "BK": 64,
        "SEGMENTS": 4,
        "SPLIT": True,
        "TILES": 32,
    }
    up = {
        "OUTS": 14336,
        "INS": 4096,
        "BM": 64,
        "BN": 128,
        "BK": 64,
        "SEGMENTS": 1,
        "SPLIT": False,
        "TILES": 224,
    }
    fixed = {
        "OUTS": 6144,
        "INS": 4096,
        "BM": 128,
        "BN": 128,
        "BK": 64,
        "SEGMENTS": 4,
        "SPLIT": False,
        "TILES": 48,
    }
    odd = {"OUTS": 100, "INS": 100, "BM": 16, "BN": 64, "BK": 32, "SEGMENTS": 2, "SPLIT": True, "TILES": 2}
    wide = dict.fromkeys(("X", "W", "Y", "R"), "*fp32")
    return [
        Sample(product, types, down | plain | {"ADD": True}, {"num_warps": 4, "num_stages": 2}),
        Sample(product, types, up | plain | {"GATE": "silu"}, {"num_warps": 4, "num_stages": 2}),
        Sample(product, types, fixed | plain, {"num_warps": 8, "num_stages": 2}),
        Sample(product, types | wide, odd | plain, {"num_warps": 4, "num_stages": 2}),
    ]
