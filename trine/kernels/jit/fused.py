"""Norms, the turn of heads on their way into KV, gated activations: one launch each.

A program works on one row (or a part of one) in a shape that only the row's own size decides, so that no bit
of it depends on the rows beside it. Weights are read before the wait for the kernel before. PDL: 0, none; 1, the
kernel behind may start at once, since it waits itself; 2, it starts where this one leaves room.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from . import Sample

# The largest numbers of a store's dtype. e4m3 has no infinity, and would become NaN.
E4M3 = tl.constexpr(448.0)
E5M2 = tl.constexpr(57344.0)
BF16 = tl.constexpr(3.3895313892515355e38)
FP16 = tl.constexpr(65504.0)


@triton.jit
def _wait(PDL: tl.constexpr):
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def norm(X, R, W, OUT, eps, SIZE: tl.constexpr, KINDS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """OUT = X / rms(X) * W; with ADD, R = X + R takes the place of X. Weights repeat after KINDS rows."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    ok = i < SIZE
    w = tl.load(W + (row % KINDS) * SIZE + i, mask=ok, other=0.0).to(tl.float32)
    _wait(PDL)
    at = row.to(tl.int64) * SIZE + i
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(R + at, mask=ok, other=0.0).to(tl.float32)).to(R.dtype.element_ty)
        tl.store(R + at, total, mask=ok)
        x = total.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * w
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def store_kv(P, x, ok):
    """Into a store of any dtype."""
    if P.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x, -E4M3, E4M3, propagate_nan=tl.PropagateNan.ALL)  # what is broken stays broken
    elif P.dtype.element_ty == tl.float8e5:
        x = tl.minimum(tl.maximum(x, -E5M2), E5M2)
    tl.store(P, x.to(P.dtype.element_ty), mask=ok)


@triton.jit
def finite(P, x):
    """Values of 16 bits are finite whatever happens: attention may multiply what nobody may see by 0."""
    if P.dtype.element_ty == tl.bfloat16:
        x = tl.minimum(tl.maximum(x, -BF16), BF16)
    elif P.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -FP16), FP16)
    return x


@triton.jit
def place(
    QKV, TABLE, POSITIONS, NORM, WRITE, Q, K, V, eps, k_stride, v_stride,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: norm and turn queries and keys, store queries in Q, keys and values in KV.

    Head by head there are two halves of DIM / 2, since a turn pairs them. Strides are of a position in KV."""
    token, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    head = chunk * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = i < DIM // 2
    turned = (head < QUERIES + KEYS) & inside
    if NORMED:
        w1 = tl.load(NORM + head * DIM + i, mask=turned, other=0.0).to(tl.float32)
        w2 = tl.load(NORM + head * DIM + DIM // 2 + i, mask=turned, other=0.0).to(tl.float32)
    _wait(PDL)
    at = QKV + token.to(tl.int64) * ((QUERIES + 2 * KEYS) * DIM) + head * DIM + i
    ok = (head < QUERIES + 2 * KEYS) & inside
    x1 = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    x2 = tl.load(at + DIM // 2, mask=ok, other=0.0).to(tl.float32)
    angle = TABLE + tl.load(POSITIONS + token).to(tl.int64) * (2 * DIM) + i
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + DIM + DIM // 2, mask=inside, other=0.0)  # its second half: not negative
    y1, y2 = x1, x2
    if NORMED:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM + eps)[:, None]
        y1, y2 = x1 * scale * w1, x2 * scale * w2
    z1, z2 = y1 * cos - y2 * sin, y2 * cos + y1 * sin
    is_query, is_key = (head < QUERIES) & inside, (head >= QUERIES) & turned
    is_value = (head >= QUERIES + KEYS) & ok
    q = Q + (token.to(tl.int64) * QUERIES + head) * DIM + i
    tl.store(q, z1.to(Q.dtype.element_ty), mask=is_query)
    tl.store(q + DIM // 2, z2.to(Q.dtype.element_ty), mask=is_query)
    position = tl.load(WRITE + token).to(tl.int64)
    k = K + position * k_stride + (head - QUERIES) * DIM + i
    v = V + position * v_stride + (head - QUERIES - KEYS) * DIM + i
    store_kv(k, z1, is_key)
    store_kv(k + DIM // 2, z2, is_key)
    store_kv(v, finite(v, x1), is_value)
    store_kv(v + DIM // 2, finite(v, x2), is_value)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """In float32. The tanh of gelu is written as a sigmoid: (1 + tanh u) / 2 = sigmoid(2 u)."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    else:
        tl.static_assert(KIND == "gelu_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def gated(X, OUT, SIZE: tl.constexpr, KIND: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """OUT = activation(gate) * up, where gate and up lie side by side in a row of X."""
    token, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    ok = i < SIZE
    _wait(PDL)
    gate = X + token.to(tl.int64) * (2 * SIZE) + i
    x = tl.load(gate, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate + SIZE, mask=ok, other=0.0).to(tl.float32)
    y = activate(x, KIND) * up
    tl.store(OUT + token.to(tl.int64) * SIZE + i, y.to(OUT.dtype.element_ty), mask=ok)


def samples() -> list[Sample]:
    rows = {"X": "*bf16", "R": "*bf16", "W": "*fp32", "OUT": "*bf16", "eps": "fp32"}
    heads = {"QKV": "*bf16", "TABLE": "*fp32", "POSITIONS": "*i32", "NORM": "*bf16", "WRITE": "*i32"}
    heads |= {"Q": "*bf16", "K": "*bf16", "V": "*bf16", "eps": "fp32", "k_stride": "i32", "v_stride": "i32"}
    sizes = {"QUERIES": 32, "KEYS": 8, "DIM": 128, "CHUNKS": 3, "HEADS": 16, "HALF": 64}
    small = {"K": "*fp8e4nv", "V": "*fp8e4nv"}
    eight = (("cuda", 90, 32), ("cuda", 100, 32))
    return [
        Sample(norm, rows, {"SIZE": 4096, "KINDS": 1, "ADD": True, "BLOCK": 4096}, {"num_warps": 8}),
        Sample(norm, rows, {"SIZE": 5000, "KINDS": 2, "ADD": False, "BLOCK": 8192}, {"num_warps": 8}),
        Sample(place, heads, sizes | {"NORMED": True}),
        Sample(place, heads | small, sizes | {"NORMED": False}, {}, eight),
        Sample(gated, {"X": "*fp16", "OUT": "*fp16"}, {"SIZE": 14336, "KIND": "silu", "CHUNKS": 7, "BLOCK": 2048}),
        Sample(gated, {"X": "*bf16", "OUT": "*bf16"}, {"SIZE": 96, "KIND": "gelu_tanh", "CHUNKS": 1, "BLOCK": 512}),
    ]  # fmt: skip
