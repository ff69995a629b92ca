"""Y = X W^T for few rows, by programs that stay: every multiprocessor reads the same share of W in one stream.

The work is tiles of BN outputs times steps of BK inputs, in one line; each program takes a run of it as long as
any other's, wherever tiles begin and end (Osama et al., "Stream-K", 2023). So none idles at the end, and the
loads of the next tile are on their way while one is finished. A tile that lies in several runs is summed up by
whichever of them is done last, in the order of the runs: the bits do not depend on who that is.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from . import Sample
from .gemm import ahead, finish, outputs


@triton.jit
def join(
    Y, R, PART, COUNT, tile, high, per, steps, rows, outs, BM: tl.constexpr, BN: tl.constexpr,
    ADD: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Count one run of a tile; the last one adds all up. A run's sums of its first tile lie in its even slot."""
    first, last = tile * steps // per, (tile * steps + steps - 1) // per
    tl.debug_barrier()  # all of the program's sums are written before it counts as done
    if tl.atomic_add(COUNT + first, 1, sem="acq_rel", scope="gpu") == last - first:
        i = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        for run in range(first, last + 1):
            slot = 2 * run + (tile > run * per // steps).to(tl.int32)
            acc += tl.load(PART + slot.to(tl.int64) * (BN * BM) + i, cache_modifier=".cg")
        finish(Y, R, acc, tile // high, tile % high * BM + tl.arange(0, BM), rows, outs, BM, BN, ADD, GATE)
        tl.store(COUNT + first, 0)


@triton.jit(do_not_specialize=["rows", "high", "per", "steps", "total"])
def stream(
    X, W, Y, R, PART, COUNT, rows, outs, ins, high, per, steps, total, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    AHEAD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A run of `per` of the `total` steps; `steps` make a tile of BN outputs (with a gate, half of them
    gates) and BM rows; `high` tiles of rows follow one another, and find W in the cache.

    PART [2 programs, BN, BM]; COUNT [programs]: zeros, before and after. AHEAD: bytes of each row of the first
    tile of W to fetch before the wait. LATE: the kernel behind may start when this one has read W, not at once."""
    pid = tl.program_id(0)
    start, stop = pid * per, tl.minimum(pid * per + per, total)
    k = tl.arange(0, BK)
    first, end = start // steps, (stop - 1) // steps
    if PDL:
        if AHEAD > 0:
            ahead(W, outputs(first // high, outs, BN, GATE), start % steps * BK, ins, AHEAD)
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    mine = PART + pid.to(tl.int64) * (2 * BN * BM) + i
    acc = tl.zeros([BN, BM], tl.float32)
    for at in tl.range(start, stop, num_stages=STAGES):
        tile, begin = at // steps, at % steps * BK
        w = W + outputs(tile // high, outs, BN, GATE).to(tl.int64)[:, None] * ins + (begin + k)[None, :]
        m = tile % high * BM + tl.arange(0, BM)
        x = X + m.to(tl.int64)[None, :] * ins + k[:, None]
        if EVEN:
            a = tl.load(w)
            b = tl.load(x + begin, mask=m[None, :] < rows, other=0.0)
        else:
            a = tl.load(w, mask=(begin + k < ins)[None, :], other=0.0)
            b = tl.load(x + begin, mask=(begin + k < ins)[:, None] & (m[None, :] < rows), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if at % steps == steps - 1:
            if at - start >= steps - 1:
                finish(
                    Y,
                    R,
                    acc,
                    tile // high,
                    tile % high * BM + tl.arange(0, BM),
                    rows,
                    outs,
                    BM,
                    BN,
                    ADD,
                    GATE,
                )
            else:
                tl.store(mine, acc)
            acc = tl.zeros([BN, BM], tl.float32)
    if PDL and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    if stop % steps != 0:
        tl.store(mine + (end > first).to(tl.int32) * (BN * BM), acc)
    for tile in range(first, end + 1, tl.maximum(end - first, 1)):
        if (tile * steps < start) | (tile * steps + steps > stop):
            join(Y, R, PART, COUNT, tile, high, per, steps, rows, outs, BM, BN, ADD, GATE)


def samples() -> list[Sample]:
    types: dict[str, str] = dict.fromkeys(("X", "W", "Y", "R"), "*bf16") | {"PART": "*fp32", "COUNT": "*i32"}
    types |= dict.fromkeys(("rows", "high", "per", "steps", "total"), "i32") | dict.fromkeys(
        ("outs", "ins"), "i32/16"
    )
    plain = {"EVEN": True, "STAGES": 4, "ADD": False, "GATE": "", "AHEAD": 0, "LATE": False}
    few = {"BM": 16, "BN": 64, "BK": 64} | plain
    return [
        Sample(stream, types, few | {"ADD": True}, {"num_warps": 4}),
        Sample(stream, types | {"Y": "*fp32", "R": "*fp32"}, few | {"BM": 32, "STAGES": 3}, {"num_warps": 4}),
        Sample(stream, types, few | {"GATE": "silu", "EVEN": False, "STAGES": 3}, {"num_warps": 4}),
    ]
