"""y = W x for one row: reading W is all the work.

A program takes a few outputs and their whole rows of W at once, in one burst of loads into registers, so that
as many bytes as possible are on their way. W does not depend on the kernel before, so the loads start before
the wait for it (PDL): its end and this one's beginning overlap. What stands before and behind a product may be
part of it: the norm of x, since every program holds all of x; the residual; the gated activation.
"""

import triton
import triton.language as tl

from . import Sample
from .fused import activate


@triton.jit
def tile(W, first, OUTS: tl.constexpr, INS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK]: rows of W from `first` on."""
    n = first + tl.arange(0, BN)[:, None]
    k = tl.arange(0, BK)[None, :]
    return tl.load(W + n.to(tl.int64) * INS + k, mask=(n < OUTS) & (k < INS), other=0.0, eviction_policy="evict_first")  # fmt: skip


@triton.jit
def gemv(
    X, W, Y, NORM, R, eps, OUTS: tl.constexpr, INS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORMED: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y = W X. NORMED: X / rms(X) * NORM is multiplied. ADD: R is added, and may be Y. GATE: the name of an
    activation, or "": W has 2 * OUTS rows, and Y = activation(gate) * up. Numbers are rounded to the dtype of
    X or Y wherever separate kernels would have stored them."""
    first = tl.program_id(0) * BN
    n, k = first + tl.arange(0, BN), tl.arange(0, BK)
    w = tile(W, first, OUTS, INS, BN, BK)
    if GATE != "":
        u = tile(W + OUTS * INS, first, OUTS, INS, BN, BK)
    if NORMED:
        g = tl.load(NORM + k, mask=k < INS, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + k, mask=k < INS, other=0.0).to(tl.float32)
    if NORMED:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / INS + eps) * g
        x = x.to(X.dtype.element_ty).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1).to(Y.dtype.element_ty)
    if GATE != "":
        up = tl.sum(u.to(tl.float32) * x[None, :], 1).to(Y.dtype.element_ty)
        y = (activate(y.to(tl.float32), GATE) * up.to(tl.float32)).to(Y.dtype.element_ty)
    if ADD:
        r = tl.load(R + n, mask=n < OUTS, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + r).to(Y.dtype.element_ty)
    tl.store(Y + n, y, mask=n < OUTS)


def samples() -> list[Sample]:
    types = {"X": "*bf16", "W": "*bf16", "Y": "*bf16", "NORM": "*fp32", "R": "*bf16", "eps": "fp32"}
    plain = {"NORMED": False, "ADD": False, "GATE": ""}
    down = {"OUTS": 4096, "INS": 14336, "BN": 1, "BK": 16384}
    up = {"OUTS": 14336, "INS": 4096, "BN": 2, "BK": 4096}
    return [
        Sample(gemv, types, down | plain | {"ADD": True}, {"num_warps": 8}),
        Sample(gemv, types, up | plain | {"NORMED": True, "GATE": "silu"}, {"num_warps": 8}),
        Sample(gemv, types | {"Y": "*fp32"}, {"OUTS": 128256, "INS": 4096, "BN": 4, "BK": 4096} | plain, {"num_warps": 8}),
    ]  # fmt: skip
