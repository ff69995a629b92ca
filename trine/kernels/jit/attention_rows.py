"""Attention of rows of one token where there are enough of them: a program for each (row, KV head).

Nothing is cut over programs, so a program has only one line of reads, from the first of a row's own positions to
the last; what it shares with other rows it takes from `shared_runs`. Programs of one row's heads run side by side:
what they read lies side by side. Rows come longest first.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from . import TARGETS, Sample
from .attention import NEVER, _attend, _attend_copied, _finish, _fold_shared, _narrow


@triton.jit
def rows(
    Q, K, V, KTILES, VTILES, PAGES, SLOTS, LENGTHS, OUT, SINK, OWN, HEAD, CHAIN, VALUES, SUMS,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, GP: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, COPIES: tl.constexpr, SHARED: tl.constexpr,
    S: tl.constexpr, M2: tl.constexpr, DEPTH: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M places for a row's G heads. COPIES: blocks fill pages evenly, and the hardware copies them.

    SHARED: `shared_runs` came before, and may still run (see `singles`); OWN [slots] says where a slot's own positions
    begin, and S behind it how many runs it shares."""
    head, row = tl.program_id(0), tl.program_id(1)
    slot, end = tl.load(SLOTS + row), tl.load(LENGTHS + row).to(tl.int32)  # there before the layers began
    end = tl.where(slot > 0, end, 0)  # slot 0 only fills a step up
    low = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    if SHARED:
        own, depth = tl.load(OWN + slot), tl.load(OWN + S + slot)
        shares = (own > 0) & (end >= own)
        low, depth = tl.where(shares, own, 0), tl.where(shares, depth, 0)
    if PDL:
        if not SHARED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g, d = tl.arange(0, M), tl.arange(0, DP)
    mask = g < G
    at = row.to(tl.int64) * q_stride + (head * G + g) * D
    q = tl.load(Q + at[:, None] + d[None, :], mask=mask[:, None] & (d < D)[None, :], other=0.0)
    high = tl.full([M], NEVER, tl.float32)
    weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
    pages = PAGES + slot.to(tl.int64) * pages_stride
    begin = low // N * N if WINDOW > 0 else low
    if COPIES:
        high, weight, acc = _attend_copied(
            q, high, weight, acc, KTILES, VTILES, pages, head * D, begin, low, end, scale, PAGE, N, SOFTCAP,
            2 if WINDOW > 0 else 1, STAGES,
        )  # fmt: skip
    else:
        high, weight, acc = _attend(
            q, high, weight, acc, K + head * head_stride, V + head * head_stride, pages, begin, low, end, g,
            page_stride, place_stride, scale, D, DP, PAGE, N, WINDOW, SOFTCAP, False, EXACT, STAGES,
        )  # fmt: skip
    if SHARED:
        if PDL:
            tl.extra.cuda.gdc_wait()
        high, weight, acc = _narrow(high, weight, acc, mask, M, GP, DP)
        high, weight, acc = _fold_shared(
            high, weight, acc, CHAIN, HEAD, VALUES, SUMS, row, head, depth, H, G, D, DP, GP, M2, DEPTH, B
        )
        _write(OUT, SINK, row, head, high, weight, acc, H, G, D, DP, GP, SINKS)
    else:
        _write(OUT, SINK, row, head, high, weight, acc, H, G, D, DP, M, SINKS)


@triton.jit
def _write(
    OUT, SINK, row, head, high, weight, acc,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    g, d = tl.arange(0, M), tl.arange(0, DP)
    value = _finish(high, weight, acc, SINK, head * G + g, g < G, SINKS)
    line = ((row * H + head) * G + g).to(tl.int64)
    to = OUT + line[:, None] * D + d[None, :]
    tl.store(to, value.to(OUT.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


def samples() -> list[Sample]:
    plain = ("Q", "K", "V", "KTILES", "VTILES", "OUT", "SINK")
    types: dict[str, str] = dict.fromkeys(plain, "*bf16")
    types |= dict.fromkeys(("PAGES", "SLOTS", "LENGTHS", "OWN", "HEAD", "CHAIN"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("VALUES", "SUMS"), "*fp32")
    types |= dict.fromkeys(
        ("q_stride", "pages_stride", "page_stride", "place_stride", "head_stride"), "i32/16"
    )
    copied = dict.fromkeys(("KTILES", "VTILES"), "tensordesc<bf16[64, 128]>")
    sizes = {"H": 8, "G": 4, "D": 128, "DP": 128, "PAGE": 64, "M": 16, "GP": 4, "N": 32}
    sizes |= {"SOFTCAP": 0.0, "SINKS": False, "EXACT": False, "PDL": False, "STAGES": 3}
    sizes |= {"COPIES": False, "S": 257, "M2": 64, "DEPTH": 8, "B": 4}
    newer = tuple(t for t in TARGETS if t[1] in (90, 100))
    options = {"num_warps": 4}
    return [
        Sample(rows, types, sizes | {"WINDOW": 0, "SHARED": False}, options),
        Sample(rows, types, sizes | {"WINDOW": 0, "SHARED": True}, options),
        Sample(rows, types, sizes | {"WINDOW": 100, "PAGE": 16, "STAGES": 2, "SHARED": False}, options),
        Sample(rows, types | copied, sizes | {"WINDOW": 0, "COPIES": True, "N": 64, "SHARED": False}, options, newer),
        Sample(rows, types | copied, sizes | {"WINDOW": 0, "COPIES": True, "N": 64, "SHARED": True}, options, newer),
    ]  # fmt: skip
