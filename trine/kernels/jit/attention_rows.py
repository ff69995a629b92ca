"""Attention of rows of one token where there are enough of them: a program for each (row, KV head).

Nothing is cut, planned or merged, so a program has only one line of reads, from the first position to the last.
Programs of one row's heads run side by side: what they read lies side by side. Rows come longest first.
"""

import triton
import triton.language as tl

from . import Sample
from .attention import NEVER, _attend, _finish


@triton.jit
def rows(
    Q, K, V, PAGES, SLOTS, LENGTHS, OUT, SINK, q_stride, pages_stride, page_stride, place_stride,
    head_stride, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M places for a row's G heads."""
    head, row = tl.program_id(0), tl.program_id(1)
    slot, end = tl.load(SLOTS + row), tl.load(LENGTHS + row).to(tl.int32)  # there before the layers began
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g, d = tl.arange(0, M), tl.arange(0, DP)
    mask = g < G
    cells = mask[:, None] & (d < D)[None, :]
    at = row.to(tl.int64) * q_stride + (head * G + g) * D
    q = tl.load(Q + at[:, None] + d[None, :], mask=cells, other=0.0)
    high = tl.full([M], NEVER, tl.float32)
    weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
    pages = PAGES + slot.to(tl.int64) * pages_stride
    low = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    high, weight, acc = _attend(
        q, high, weight, acc, K + head * head_stride, V + head * head_stride, pages, low // N * N, low, end, g,
        page_stride, place_stride, scale, D, DP, PAGE, N, WINDOW, SOFTCAP, False, EXACT, STAGES,
    )  # fmt: skip
    value = _finish(high, weight, acc, SINK, head * G + g, mask, SINKS)
    line = ((row * H + head) * G + g).to(tl.int64)
    tl.store(OUT + line[:, None] * D + d[None, :], value.to(OUT.dtype.element_ty), mask=cells)


def samples() -> list[Sample]:
    types: dict[str, str] = dict.fromkeys(("Q", "K", "V", "OUT", "SINK"), "*bf16")
    types |= dict.fromkeys(("PAGES", "SLOTS", "LENGTHS"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(
        ("q_stride", "pages_stride", "page_stride", "place_stride", "head_stride"), "i32/16"
    )
    sizes = {
        "H": 8,
        "G": 4,
        "D": 128,
        "DP": 128,
        "PAGE": 64,
        "M": 16,
        "N": 32,
        "SOFTCAP": 0.0,
        "SINKS": False,
    }
    rest = sizes | {"EXACT": False, "PDL": False, "STAGES": 3}
    options = {"num_warps": 4}
    return [
        Sample(rows, types, rest | {"WINDOW": 0}, options),
        Sample(rows, types, rest | {"WINDOW": 100, "PAGE": 16, "STAGES": 2}, options),
    ]
