"""Attention whose bits depend on nothing but a row's own positions: not on what shares the step, nor on cuts.

Positions are taken in runs of RUN, from multiples of RUN on. Each run has its own softmax, in blocks and query
tiles of one shape; runs are folded one after the other, in the order of positions, by the same arithmetic wherever
that happens: in the program that walked through the first runs, or in `merge_runs` from what others kept of
theirs. Compiled without fused multiply-adds, since a compiler may choose them differently in each kernel.

A position in the line of work (see plan.py) is a run of a head; a program keeps each run in the line of that
number, but those from a row's first run on, which it folds, in the line of the first.
"""

import triton
import triton.language as tl

from . import Sample
from .attention import NEVER, _attend, _finish, _keep, _read, _segment
from .attention_prompts import _fold


@triton.jit
def _run(
    q, K, V, PAGES, run, low, end, edge, page_stride, place_stride, scale,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of one run, what lies in low..end; blocks in which nothing is seen change nothing, so they are left out."""
    begin = tl.maximum(run * RUN, low // N * N)
    return _attend(
        q, tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32), K, V, PAGES,
        begin, low, tl.minimum(run * RUN + RUN, end), edge, page_stride, place_stride, scale,
        D, DP, PAGE, N, WINDOW, SOFTCAP, True, EXACT, STAGES,
    )  # fmt: skip


@triton.jit
def runs(
    Q, K, V, PAGES, OUT, SINK, HEAD, LIST, DESK, VALUES, SUMS, q_stride, pages_stride, page_stride, place_stride,
    head_stride, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one token: as many programs as the plan was made for."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g, d = tl.arange(0, M), tl.arange(0, DP)
    mask = g < G
    cells = mask[:, None] & (d < D)[None, :]
    whole = tl.load(HEAD + 5)
    x = tl.program_id(0) * tl.load(HEAD + 1)
    stop = tl.minimum(x + tl.load(HEAD + 1), tl.load(HEAD))
    row, slot, first, end, c0, c1, place, _ = _segment(DESK + tl.program_id(0) * 8)
    while x < stop:
        head, block = (x - c0 * H) // (c1 - c0), (x - c0 * H) % (c1 - c0)
        n = tl.minimum(c1 - c0 - block, stop - x)
        every = tl.cdiv(end, RUN) - first // RUN
        ahead = every if whole == 1 else n
        at = row.to(tl.int64) * q_stride + (head * G + g) * D
        q = tl.load(Q + at[:, None] + d[None, :], mask=cells, other=0.0)
        edge = tl.zeros([M], tl.int32) + (end - 1)
        high = tl.full([M], NEVER, tl.float32)
        weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
        for i in range(0, ahead):
            high2, weight2, acc2 = _run(
                q, K + head * head_stride, V + head * head_stride, PAGES + slot.to(tl.int64) * pages_stride,
                first // RUN + block + i, first, end, edge, page_stride, place_stride, scale,
                M, D, DP, PAGE, N, RUN, WINDOW, SOFTCAP, EXACT, STAGES,
            )  # fmt: skip
            if block == 0:
                high, weight, acc = _fold(high, weight, acc, high2, weight2, acc2)
            else:
                _keep(VALUES, SUMS, (x + i) * G + g, high2, weight2, acc2, mask, D, DP)
        if block == 0:
            if ahead == every:
                value = _finish(high, weight, acc, SINK, head * G + g, mask, SINKS)
                line = ((row * H + head) * G + g).to(tl.int64)
                tl.store(OUT + line[:, None] * D + d[None, :], value.to(OUT.dtype.element_ty), mask=cells)
            else:
                _keep(VALUES, SUMS, x * G + g, high, weight, acc, mask, D, DP)
        x += n
        place += (x >= c1 * H).to(tl.int32)
        row, slot, first, end, c0, c1, place, _ = _segment(LIST + place * 8)


@triton.jit
def merge_runs(
    HEAD, ROWS, VALUES, SUMS, OUT, SINK,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program for each (row, KV head): what the first program folded, then one run after the other."""
    row, head = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(HEAD + 1)
    size = tl.load(ROWS + row * 4 + 1)
    x = tl.load(ROWS + row * 4) * H + head * size
    folded = (x // chunk + 1) * chunk - x
    cut = (tl.load(HEAD + 5) == 0) & (folded < size)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if cut:
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        mask = g < G
        cells = mask[:, None] & (d < D)[None, :]
        line = x.to(tl.int64) * G + g
        high = tl.load(SUMS + line * 2, mask=mask, other=NEVER)
        weight = tl.load(SUMS + line * 2 + 1, mask=mask, other=0.0)
        acc = tl.load(VALUES + line[:, None] * D + d[None, :], mask=cells, other=0.0)
        for i in range(folded, size):
            at = line + i * G
            high2 = tl.load(SUMS + at * 2, mask=mask, other=NEVER)
            weight2 = tl.load(SUMS + at * 2 + 1, mask=mask, other=0.0)
            acc2 = tl.load(VALUES + at[:, None] * D + d[None, :], mask=cells, other=0.0)
            high, weight, acc = _fold(high, weight, acc, high2, weight2, acc2)
        value = _finish(high, weight, acc, SINK, head * G + g, mask, SINKS)
        at = ((row * H + head) * G + g).to(tl.int64)[:, None] * D + d[None, :]
        tl.store(OUT + at, value.to(OUT.dtype.element_ty), mask=cells)


@triton.jit
def prompt_runs(
    Q, K, V, PAGES, OUT, SINK, SLOTS, STARTS, LENGTHS, HEAD, LIST,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, RUN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program for each (KV head, tile of M // G tokens of a row); the last tiles, which see most, first."""
    item = tl.load(HEAD + 4) - 1 - tl.program_id(1)
    if item >= 0:
        head = tl.program_id(0)
        row, tile = tl.load(LIST + item * 2), tl.load(LIST + item * 2 + 1)
        TM: tl.constexpr = M // G
        start = tl.load(STARTS + row).to(tl.int32)
        count = tl.load(STARTS + row + 1).to(tl.int32) - start
        length = tl.load(LENGTHS + row).to(tl.int32)
        m, d = tl.arange(0, M), tl.arange(0, DP)
        token = tile * TM + m // G
        mask = (m // G < TM) & (token < count)
        cells = mask[:, None] & (d < D)[None, :]
        heads = head * G + m % G
        at = (start + token).to(tl.int64) * q_stride + heads * D
        q = tl.load(Q + at[:, None] + d[None, :], mask=cells, other=0.0)
        before = length - count + tile * TM  # position of the tile's first token
        end = tl.minimum(before + TM, length)
        low = tl.maximum(before - WINDOW + 1, 0) if WINDOW > 0 else 0
        high = tl.full([M], NEVER, tl.float32)
        weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
        for run in range(low // RUN, tl.cdiv(end, RUN)):
            high2, weight2, acc2 = _run(
                q, K + head * head_stride, V + head * head_stride,
                PAGES + tl.load(SLOTS + row).to(tl.int64) * pages_stride, run, low, end, length - count + token,
                page_stride, place_stride, scale, M, D, DP, PAGE, N, RUN, WINDOW, SOFTCAP, EXACT, STAGES,
            )  # fmt: skip
            high, weight, acc = _fold(high, weight, acc, high2, weight2, acc2)
        value = _finish(high, weight, acc, SINK, heads, mask, SINKS)
        line = (start + token).to(tl.int64) * (H * G) + heads
        tl.store(OUT + line[:, None] * D + d[None, :], value.to(OUT.dtype.element_ty), mask=cells)


def samples() -> list[Sample]:
    types, constants = _read("*bf16", 128)
    tables = dict.fromkeys(("HEAD", "LIST"), "*i32")
    parts = dict.fromkeys(("VALUES", "SUMS"), "*fp32")
    tile = {"M": 64, "N": 64, "RUN": 256, "STAGES": 2}
    shape = {name: constants[name] for name in ("H", "G", "D", "DP", "SINKS")} | {"GP": 4}
    rows = dict.fromkeys(("SLOTS", "STARTS", "LENGTHS"), "*i32")
    plain = {"num_warps": 4, "enable_fp_fusion": False}
    return [
        Sample(runs, types | tables | parts | {"DESK": "*i32"}, constants | tile, plain),
        Sample(prompt_runs, types | tables | rows, constants | tile, plain),
        Sample(
            merge_runs,
            {"HEAD": "*i32", "ROWS": "*i32", "OUT": "*bf16", "SINK": "*bf16"} | parts,
            shape,
            plain,
        ),
    ]
