"""Attention of rows of several tokens: tiles of a prompt's queries over paged KV.

Where tiles are few each is cut over several programs, and merged by the last of them to finish, in the order of
positions: so no bit depends on which that is.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from . import TARGETS, Sample
from .attention import NEVER, _attend, _attend_copied, _finish, _keep, _read


@triton.jit
def _fold(high, weight, acc, high2, weight2, acc2):
    """The second behind the first. What is empty changes no bit of the other."""
    higher = tl.maximum(high, high2)
    fade, fade2 = tl.exp2(high - higher), tl.exp2(high2 - higher)
    return higher, weight * fade + weight2 * fade2, acc * fade[:, None] + acc2 * fade2[:, None]


@triton.jit
def _last(COUNT, parts):
    """Whether all other parts are there. Every write of this program comes before."""
    tl.debug_barrier()
    last = tl.atomic_add(COUNT, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(COUNT, 0)
    return last


@triton.jit
def _last_prompt(
    high, weight, acc, mask, line, COUNTS, VALUES, SUMS, cut, cuts, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Keeps a tile's part number `cut`; with the last one of them all, what they amount to."""
    m, d = tl.arange(0, M), tl.arange(0, DP)
    _keep(VALUES, SUMS, (line * cuts + cut) * M + m, high, weight, acc, mask, D, DP)
    last = _last(COUNTS + line, cuts)
    if last:
        high, weight = tl.full([M], NEVER, tl.float32), tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for i in range(0, cuts):
            at = ((line * cuts + i) * M + m).to(tl.int64)
            high2 = tl.load(SUMS + at * 2, mask=mask, other=NEVER, cache_modifier=".cg")
            weight2 = tl.load(SUMS + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
            cells = mask[:, None] & (d < D)[None, :]
            acc2 = tl.load(VALUES + at[:, None] * D + d[None, :], mask=cells, other=0.0, cache_modifier=".cg")
            high, weight, acc = _fold(high, weight, acc, high2, weight2, acc2)
    return last, high, weight, acc


@triton.jit
def prompts(
    Q, K, V, KTILES, VTILES, PAGES, OUT, SINK, SLOTS, STARTS, LENGTHS, HEAD, LIST, COUNTS, VALUES, SUMS,
    q_stride, pages_stride, page_stride, place_stride, head_stride, scale, cuts,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """A program for each (KV head, tile of M // G tokens of a row); the last tiles, which see most, first.

    SPLIT: `cuts` of them, each for its part of the positions; COUNTS [tiles * H] are zeros, before and after."""
    item = tl.load(HEAD + 4) - 1 - tl.program_id(1)
    if item >= 0:
        head, cut = tl.program_id(0), tl.program_id(2)
        row, tile = tl.load(LIST + item * 2), tl.load(LIST + item * 2 + 1)
        TM: tl.constexpr = M // G
        start = tl.load(STARTS + row).to(tl.int32)
        count = tl.load(STARTS + row + 1).to(tl.int32) - start
        done = tl.load(LENGTHS + row).to(tl.int32) - count
        PAGES += tl.load(SLOTS + row).to(tl.int64) * pages_stride
        m, d = tl.arange(0, M), tl.arange(0, DP)
        token = tile * TM + m // G
        mask = (m // G < TM) & (token < count)
        cells = mask[:, None] & (d < D)[None, :]
        heads = head * G + m % G
        at = (start + token).to(tl.int64) * q_stride + heads * D
        q = tl.load(Q + at[:, None] + d[None, :], mask=cells, other=0.0)
        before, edge = done + tile * TM, done + token  # positions: of the tile's first token; of each
        end = tl.minimum(before + TM, done + count)
        low = tl.maximum(before - WINDOW + 1, 0) if WINDOW > 0 else 0
        begin = low // N * N
        if SPLIT:
            size = tl.cdiv(tl.cdiv(end - begin, N), cuts) * N
            begin += cut * size
            end = tl.minimum(begin + size, end)
        # Blocks that all queries see whole need no edge.
        clear = begin if WINDOW > 0 else tl.maximum(tl.minimum((before + 1) // N * N, end), begin)
        high = tl.full([M], NEVER, tl.float32)
        weight, acc = tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)
        K, V = K + head * head_stride, V + head * head_stride
        if COPIES and WINDOW == 0:
            high, weight, acc = _attend_copied(
                q, high, weight, acc, KTILES, VTILES, PAGES, head * D, begin, low, clear, scale, PAGE, N, SOFTCAP, 0, STAGES
            )  # fmt: skip
        elif WINDOW == 0:
            high, weight, acc = _attend(
                q, high, weight, acc, K, V, PAGES, begin, 0, clear, edge, page_stride, place_stride, scale,
                D, DP, PAGE, N, WINDOW, SOFTCAP, False, EXACT, STAGES,
            )  # fmt: skip
        high, weight, acc = _attend(
            q, high, weight, acc, K, V, PAGES, clear, low, end, edge, page_stride, place_stride, scale,
            D, DP, PAGE, N, WINDOW, SOFTCAP, True, EXACT, STAGES,
        )  # fmt: skip
        if SPLIT:
            last, high, weight, acc = _last_prompt(
                high, weight, acc, mask, item * H + head, COUNTS, VALUES, SUMS, cut, cuts, M, D, DP
            )
            cells = cells & last
        value = _finish(high, weight, acc, SINK, heads, mask, SINKS)
        at = ((start + token).to(tl.int64) * (H * G) + heads) * D
        tl.store(OUT + at[:, None] + d[None, :], value.to(OUT.dtype.element_ty), mask=cells)


def samples() -> list[Sample]:
    types, constants = _read("*bf16", 128)
    types |= dict.fromkeys(("SLOTS", "STARTS", "LENGTHS", "HEAD", "LIST", "COUNTS"), "*i32")
    types |= dict.fromkeys(("VALUES", "SUMS"), "*fp32") | {"cuts": "i32"}
    constants |= {"M": 64, "N": 64, "STAGES": 2, "SPLIT": True, "COPIES": False}
    tiles = dict.fromkeys(("KTILES", "VTILES"), "*bf16")
    copied = dict.fromkeys(("KTILES", "VTILES"), "tensordesc<bf16[64, 128]>")
    newer = tuple(t for t in TARGETS if t[1] in (90, 100))
    plain = {"num_warps": 4}
    return [
        Sample(prompts, types | tiles, constants | {"SPLIT": False}, plain),
        Sample(prompts, types | tiles, constants, plain),
        Sample(prompts, types | copied, constants | {"PAGE": 64, "COPIES": True}, plain, newer),
    ]
