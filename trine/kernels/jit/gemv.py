"""y = W x for one row: reading W is all the work.

A program takes a few outputs and their whole rows of W at once, in one burst of loads into registers, so that
as many bytes as possible are on their way. W does not depend on the kernel before, so the loads start before
the wait for it (PDL): its end and this one's beginning overlap. What stands before and behind a product may be
part of it: the norm of x, since every program holds all of x; the residual; the gated activation.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from . import Sample
from .fused import activate


@triton.jit
def lines(W, n, outs, ins, BK: tl.constexpr, EVEN: tl.constexpr):
    """[BN, BK]: rows n of W. EVEN: BK is the number of inputs."""
    k = tl.arange(0, BK)[None, :]
    ok = n[:, None] < outs
    if not EVEN:
        ok = ok & (k < ins)
    return tl.load(W + n.to(tl.int64)[:, None] * ins + k, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def gemv(
    X, W, Y, NORM, R, eps, outs, ins, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    NORMED: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y = W X. NORMED: X / rms(X) * NORM is multiplied. ADD: R is added, and may be Y. GATE: the name of an
    activation, or "": W has 2 * outs rows, and Y = activation(gate) * up. Numbers are rounded to the dtype of
    X or Y wherever separate kernels would have stored them."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    w = lines(W, n, outs, ins, BK, EVEN)
    if GATE != "":
        u = lines(W + outs.to(tl.int64) * ins, n, outs, ins, BK, EVEN)
    if NORMED:
        g = tl.load(NORM + k, mask=k < ins, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + k, mask=k < ins, other=0.0).to(tl.float32)
    if NORMED:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / ins + eps) * g
        x = x.to(X.dtype.element_ty).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1).to(Y.dtype.element_ty)
    if GATE != "":
        up = tl.sum(u.to(tl.float32) * x[None, :], 1).to(Y.dtype.element_ty)
        y = (activate(y.to(tl.float32), GATE) * up.to(tl.float32)).to(Y.dtype.element_ty)
    if ADD:
        r = tl.load(R + n, mask=n < outs, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + r).to(Y.dtype.element_ty)
    tl.store(Y + n, y, mask=n < outs)


def samples() -> list[Sample]:
    types = {"X": "*bf16", "W": "*bf16", "Y": "*bf16", "NORM": "*fp32", "R": "*bf16", "eps": "fp32"}
    types |= {"outs": "i32/16", "ins": "i32/16"}
    down = {"BN": 1, "BK": 16384, "EVEN": False, "NORMED": False, "ADD": True, "GATE": ""}
    up = {"BN": 2, "BK": 4096, "EVEN": True, "NORMED": True, "ADD": False, "GATE": "silu"}
    return [
        Sample(gemv, types, down, {"num_warps": 8}),
        Sample(gemv, types, up, {"num_warps": 8}),
        Sample(gemv, types | {"Y": "*fp32"}, up | {"NORMED": False, "GATE": ""}, {"num_warps": 8}),
    ]
