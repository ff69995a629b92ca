"""Y = X W^T on tensor cores, W read once: for few rows, and for any number with the same bits.

Sums over the inputs are made in SEGMENTS, each one behind the other, and the sums of segments are added in
their order. Segments of a tile may be the work of one program, or (SPLIT) of several: then each writes its
sums to PART, and whichever is last adds them up. The order is the same, so the bits are. W is the left operand
of the product, since 64 of its rows always exist: so 16 rows of X need not fill 64.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from . import Sample
from .fused import activate


@triton.jit
def outputs(tile, outs, BN: tl.constexpr, GATE: tl.constexpr):
    """[BN]: rows of W that a tile multiplies by. With a gate: half of them gates, then their ups."""
    i = tl.arange(0, BN)
    if GATE == "":
        n = tl.minimum(tile * BN + i, outs - 1)
    else:
        n = tl.minimum(tile * (BN // 2) + i % (BN // 2), outs - 1) + i // (BN // 2) * outs
    return n


@triton.jit
def segment(X, W, m, n, first, length, rows, ins, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """[BN, BM] float32: the sums over `length` inputs from `first` on. EVEN: the segments fill the inputs."""
    k = first + tl.arange(0, BK)
    w = W + n.to(tl.int64)[:, None] * ins + k[None, :]
    x = X + m.to(tl.int64)[None, :] * ins + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(0, length, BK):
        if EVEN:
            a = tl.load(w)
            b = tl.load(x, mask=m[None, :] < rows, other=0.0)
        else:
            inside = k + start < ins
            a = tl.load(w, mask=inside[None, :], other=0.0)
            b = tl.load(x, mask=inside[:, None] & (m[None, :] < rows), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        w += BK
        x += BK
    return acc


@triton.jit
def finish(Y, R, acc, tile, m, rows, outs, BM: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """What stands behind a product, rounded to the dtype of Y wherever separate kernels would have stored it."""
    if GATE != "":
        both = acc.to(Y.dtype.element_ty).to(tl.float32).reshape(2, BN // 2, BM).permute(1, 2, 0)
        gate, up = tl.split(both)
        y = (activate(gate, GATE) * up).to(Y.dtype.element_ty)
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
    else:
        y = acc.to(Y.dtype.element_ty)
        n = tile * BN + tl.arange(0, BN)
    ok = (n[:, None] < outs) & (m[None, :] < rows)
    at = m.to(tl.int64)[None, :] * outs + n[:, None]
    if ADD:
        y = (y.to(tl.float32) + tl.load(R + at, mask=ok, other=0.0).to(tl.float32)).to(Y.dtype.element_ty)
    tl.store(Y + at, y, mask=ok)


@triton.jit
def total(parts, i, segments, BN: tl.constexpr, BM: tl.constexpr):
    """The sums of all segments, past the first-level cache, which knows nothing of other programs."""
    acc = tl.load(parts + i, cache_modifier=".cg")
    for s in range(1, segments):
        acc += tl.load(parts + s * (BN * BM) + i, cache_modifier=".cg")
    return acc


@triton.jit(do_not_specialize=["rows"])
def product(
    X, W, Y, R, PART, COUNT, rows, outs, ins, segments, length, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """A tile of BN outputs and BM rows. Segments have `length` inputs, but for the last.

    PART [tiles, segments, BN, BM], COUNT [tiles]: zeros, before and after. GROUP tiles of rows run together: the
    parts of W and X that they share stay cached."""
    programs = segments if SPLIT else 1  # of a tile
    pid, index = tl.program_id(0) // programs, tl.program_id(0) % programs
    tiles = tl.cdiv(outs, BN if GATE == "" else BN // 2)
    above = pid // (GROUP * tiles) * GROUP
    size = tl.minimum(tl.cdiv(rows, BM) - above, GROUP)
    tile_m, tile = above + pid % (GROUP * tiles) % size, pid % (GROUP * tiles) // size
    m, n = tile_m * BM + tl.arange(0, BM), outputs(tile, outs, BN, GATE)
    acc = segment(X, W, m, n, index * length, length, rows, ins, BM, BN, BK, EVEN)
    if SPLIT:
        i = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        parts = PART + pid.to(tl.int64) * (segments * BN * BM)
        tl.store(parts + index * (BN * BM) + i, acc)
        tl.debug_barrier()  # all of the program's sums are written before it counts as done
        if tl.atomic_add(COUNT + pid, 1, sem="acq_rel", scope="gpu") == segments - 1:
            finish(Y, R, total(parts, i, segments, BN, BM), tile, m, rows, outs, BM, BN, ADD, GATE)
            tl.store(COUNT + pid, 0)
    else:
        for s in range(1, segments):
            acc += segment(X, W, m, n, s * length, length, rows, ins, BM, BN, BK, EVEN)
        finish(Y, R, acc, tile, m, rows, outs, BM, BN, ADD, GATE)


def samples() -> list[Sample]:
    types: dict[str, str] = dict.fromkeys(("X", "W", "Y", "R"), "*bf16") | {"PART": "*fp32", "COUNT": "*i32"}
    types |= {"rows": "i32", "segments": "i32"} | dict.fromkeys(("outs", "ins", "length"), "i32/16")
    plain = {"EVEN": True, "SPLIT": False, "GROUP": 8, "ADD": False, "GATE": ""}
    few = {"BM": 64, "BN": 128, "BK": 64} | plain
    one = {name: kind for name, kind in types.items() if name != "segments"}
    wide = types | dict.fromkeys(("X", "W", "Y", "R"), "*fp32")
    return [
        Sample(product, types, few | {"SPLIT": True, "ADD": True}, {"num_warps": 4, "num_stages": 2}),
        Sample(product, one, few | {"GATE": "silu", "segments": 1}, {"num_warps": 4, "num_stages": 2}),
        Sample(product, types, few | {"BM": 128}, {"num_warps": 8, "num_stages": 2}),
        Sample(product, wide, few | {"BK": 32, "BN": 64, "EVEN": False}, {"num_warps": 4, "num_stages": 2}),
    ]
