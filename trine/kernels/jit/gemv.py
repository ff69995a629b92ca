"""y = W x for one row: reading W is all the work.

A program takes a few outputs and their whole rows of W at once, in one burst of loads into registers, so that
as many bytes as possible are on their way. W does not depend on the kernel before, so the loads start before
the wait for it (PDL): its end and this one's beginning overlap. What stands before and behind a product may be
part of it: the norm of x, since every program holds all of x; the residual; the gated activation.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from . import TARGETS, Sample
from .fused import activate


@triton.jit
def lines(W, n, ok, ins, BK: tl.constexpr, EVEN: tl.constexpr):
    """[n, BK]: rows n of W. EVEN: BK is the number of inputs."""
    k = tl.arange(0, BK)[None, :]
    ok = ok[:, None]
    if not EVEN:
        ok = ok & (k < ins)
    return tl.load(W + n.to(tl.int64)[:, None] * ins + k, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def plus(a, b, c, d):
    return a + c, b + d


@triton.jit
def normed(w, x, g, ins, eps):
    """Sums of w times the norm of x: both sums in one pass, so that a program waits for its threads once."""
    x, _ = tl.broadcast(x[None, :], w)
    y, squares = tl.reduce((w * (x * g[None, :]), x * x), 1, plus)
    return y * tl.rsqrt(squares / ins + eps)


@triton.jit
def fetch(W, tile, outs, ins, BN: tl.constexpr):
    """Bring the rows of another program to the second-level cache, by one instruction of one thread. (sm_90)"""
    first = tl.minimum(tile * BN, outs)
    size = tl.minimum(outs - first, BN) * (ins * (W.dtype.element_ty.primitive_bitwidth // 8))
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        setp.gt.and.u32 p, $2, 0, p;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [(W + first.to(tl.int64) * ins).to(tl.int64), size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def gemv(
    X, W, Y, NORM, R, eps, outs, ins, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    NORMED: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y = W X. NORMED: X / rms(X) * NORM is multiplied. ADD: R is added, and may be Y. GATE: the name of an
    activation, or "": W has 2 * outs rows, and Y = activation(gate) * up. AHEAD: programs later whose W is
    fetched. Numbers are rounded to the dtype of Y wherever separate kernels would have stored them; a norm
    is not."""
    k, i = tl.arange(0, BK), tl.arange(0, BN if GATE == "" else 2 * BN)
    n = tl.program_id(0) * BN + i % BN
    w = lines(W, n + i // BN * outs, n < outs, ins, BK, EVEN)
    if NORMED:
        g = tl.load(NORM + k, mask=k < ins, other=0.0).to(tl.float32)
    if PDL:
        if AHEAD > 0:
            fetch(W, tl.program_id(0) + AHEAD, outs, ins, BN)
            if GATE != "":
                fetch(W + outs.to(tl.int64) * ins, tl.program_id(0) + AHEAD, outs, ins, BN)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + k, mask=k < ins, other=0.0).to(tl.float32)
    if NORMED:
        y = normed(w.to(tl.float32), x, g, ins, eps).to(Y.dtype.element_ty)
    else:
        y = tl.sum(w.to(tl.float32) * x[None, :], 1).to(Y.dtype.element_ty)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if GATE != "":
        gate, up = tl.split(y.to(tl.float32).reshape(2, BN).permute(1, 0))
        y = (activate(gate, GATE) * up).to(Y.dtype.element_ty)
    if ADD:
        r = tl.load(R + n, mask=n < outs, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + r).to(Y.dtype.element_ty)
    tl.store(Y + n, y, mask=n < outs)


def samples() -> list[Sample]:
    types = {"X": "*bf16", "W": "*bf16", "Y": "*bf16", "NORM": "*fp32", "R": "*bf16", "eps": "fp32"}
    types |= {"outs": "i32/16", "ins": "i32/16"}
    down = {"BN": 1, "BK": 16384, "EVEN": False, "NORMED": False, "ADD": True, "GATE": "", "AHEAD": 0}
    up = {"BN": 2, "BK": 4096, "EVEN": True, "NORMED": True, "ADD": False, "GATE": "silu", "AHEAD": 0}
    return [
        Sample(gemv, types, down, {"num_warps": 8}),
        Sample(gemv, types, up, {"num_warps": 8}),
        Sample(gemv, types, up | {"AHEAD": 1056}, {"num_warps": 8}, TARGETS[1:3]),
        Sample(gemv, types | {"Y": "*fp32"}, up | {"NORMED": False, "GATE": ""}, {"num_warps": 8}),
    ]
