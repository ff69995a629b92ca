"""How deep a row's draw may go below its likeliest token: min_p, top_k, then top_p of what these leave.

Nothing is sorted. Depths, (largest - logit) / temperature, are first counted in bins, and their chances added; this
says in which bin the cut of top_k is, and nearly always in which that of top_p is. Depths around there are collected,
those above are only added up; the cut is then found among the collected ones by bisection over the bits of the
floats, which grow with them. Should it lie elsewhere after all, or too many lie there, bisection goes over the whole
row instead. What is deeper than LIMIT, which is known before, is never looked at: with a top_k of no more than there
are chunks, few tokens are left.

Chances are added as whole numbers, so that sums do not depend on their order.
"""

import triton
import triton.language as tl

from . import Sample
from .sampling import NEVER, TOP_K, TOP_P, WIDE, cold, depth, nth, read

UNIT = tl.constexpr(2.0**40)  # of the whole numbers in which chances are added: the largest chance is 1
BINS = tl.constexpr(4096)
FAR = tl.constexpr(12.0)  # nats: without top_k what is deeper shares the last bin
# a bin is a word of 64 bits: 19 of a count, 45 of chances in units of 2^-26
COUNTS = tl.constexpr(45)
ONE = tl.constexpr(1 << 45)
CHANCES = tl.constexpr((1 << 45) - 1)
BIN_UNIT = tl.constexpr(2.0**26)
NONE = tl.constexpr(0x7FFFFFFF)
MARGIN = tl.constexpr(2e-5)  # of all chances: how far what bins say of them may be off, nearly always
LOW, HIGH, COUNT, ABOVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # of FOUND
FACTS = tl.constexpr(4)


@triton.jit
def far(deep):
    """Nats, from their bits."""
    return deep.to(tl.float32, bitcast=True)


@triton.jit
def bin_of(deep, some):
    """Fine bins where chances are large. Monotonic. `some`: top_k is set."""
    x = tl.minimum(far(deep), 32.0)
    bin = tl.where(x < 8.0, x * 256.0, 2048.0 + (x - 8.0) * 85.0).to(tl.int32)
    return tl.where((x > FAR) & (some == 0), BINS - 1, bin)


@triton.jit
def whole(deep, inside):
    """Chances as whole numbers."""
    return tl.where(inside, (tl.exp(-far(tl.where(inside, deep, 0))) * UNIT).to(tl.int64), 0)


@triton.jit
def nearest(TOPS, row, part, chunks, top, temperature, CHUNKS: tl.constexpr):
    """The depth of the likeliest of CHUNKS chunks, from `part` * CHUNKS on."""
    i = part * CHUNKS + tl.arange(0, CHUNKS)
    return depth(tl.max(tl.load(TOPS + row * chunks + i, mask=i < chunks, other=NEVER), 0), top, temperature)


@triton.jit
def spread(
    LOGITS, WORK, WHERE, SLOTS, REALS, WHOLES, WHICH, TOP, LIMIT, TOPS, HISTOGRAM, stride, vocab, chunks,
    EDITED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the depths of a part of row WHICH[program]: HISTOGRAM [which, BINS], zero before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(WHICH + place).to(tl.int32)
    slot = tl.load(SLOTS + row).to(tl.int32)
    temperature, top, limit = cold(REALS, slot), tl.load(TOP + row), tl.load(LIMIT + row)
    if nearest(TOPS, row, part, chunks, top, temperature, CHUNKS) <= limit:
        i = part * BLOCK + tl.arange(0, BLOCK)
        deep = depth(read(LOGITS, WORK, WHERE, row, stride, vocab, i, EDITED), top, temperature)
        inside = deep <= limit
        top_k = tl.load(WHOLES + slot * WIDE + TOP_K)
        bin = bin_of(deep, (top_k > 0) & (top_k < vocab))
        one = (tl.exp(-far(tl.where(inside, deep, 0))) * BIN_UNIT + 0.5).to(tl.int64) + ONE
        bins = HISTOGRAM + place * BINS + bin
        shared = inside & (bin == BINS - 1)
        tl.atomic_add(bins, one, mask=inside & (shared == 0), sem="relaxed")
        rest = tl.sum(tl.where(shared, one, 0), 0)
        if rest != 0:
            tl.atomic_add(HISTOGRAM + place * BINS + BINS - 1, rest, sem="relaxed")


@triton.jit
def bracket(
    SLOTS, REALS, WHOLES, WHICH, HISTOGRAM, FOUND, vocab, PDL: tl.constexpr,
):  # fmt: skip
    """Which bins are to be collected for row WHICH[program]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0)
    slot = tl.load(SLOTS + tl.load(WHICH + place).to(tl.int32)).to(tl.int32)
    top_k, top_p = tl.load(WHOLES + slot * WIDE + TOP_K), tl.load(REALS + slot * WIDE + TOP_P).to(tl.float32)
    bins = tl.arange(0, BINS)
    words = tl.load(HISTOGRAM + place * BINS + bins)
    counts = ((words >> COUNTS) & 0x7FFFF).to(tl.int32)
    before = tl.cumsum(counts, 0) - counts
    some = (top_k > 0) & (top_k < vocab)
    # the bin of the last of top_k: behind those before which fewer than top_k lie
    last = tl.sum((before < tl.where(some, top_k, vocab)).to(tl.int32), 0) - 1
    last = tl.where(some, last, BINS - 1)
    low = tl.where(some, last, BINS)  # with min_p alone nothing has to be found
    high = low
    if top_p < 1.0:
        chances = tl.where(bins <= last, (words & CHANCES).to(tl.float32), 0.0)
        sums = tl.cumsum(chances, 0)
        total = tl.sum(chances, 0)
        low = tl.minimum(tl.sum((sums < (top_p - MARGIN) * total).to(tl.int32), 0), last)
        high = tl.minimum(tl.sum((sums < (top_p + MARGIN) * total).to(tl.int32), 0), last)
        high = tl.where(some, last, high)
    found = FOUND + place * FACTS
    tl.store(found + LOW, low)
    tl.store(found + HIGH, high)
    tl.store(found + COUNT, 0)
    tl.store(found + ABOVE, 0)


@triton.jit
def collect(
    LOGITS, WORK, WHERE, SLOTS, REALS, WHOLES, WHICH, TOP, LIMIT, TOPS, FOUND, SUMS, DEPTHS,
    stride, vocab, chunks,
    EDITED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of row WHICH[program]: depths in the bracket go to DEPTHS [which, ROOM], chances before it and behind
    it are added to SUMS [which, 2], zero before; FOUND counts those in it and before it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(WHICH + place).to(tl.int32)
    slot = tl.load(SLOTS + row).to(tl.int32)
    temperature, top, limit = cold(REALS, slot), tl.load(TOP + row), tl.load(LIMIT + row)
    low, high = tl.load(FOUND + place * FACTS + LOW), tl.load(FOUND + place * FACTS + HIGH)
    if nearest(TOPS, row, part, chunks, top, temperature, CHUNKS) <= limit:
        i = part * BLOCK + tl.arange(0, BLOCK)
        deep = depth(read(LOGITS, WORK, WHERE, row, stride, vocab, i, EDITED), top, temperature)
        top_k = tl.load(WHOLES + slot * WIDE + TOP_K)
        inside, bin = deep <= limit, bin_of(deep, (top_k > 0) & (top_k < vocab))
        found, before, kept = (
            FOUND + place * FACTS,
            inside & (bin < low),
            inside & (bin >= low) & (bin <= high),
        )
        above, below = tl.sum(whole(deep, before), 0), tl.sum(whole(deep, inside & (bin > high)), 0)
        passed = tl.sum(before.to(tl.int32), 0)
        if passed > 0:
            tl.atomic_add(SUMS + place * 2, above, sem="relaxed")
            tl.atomic_add(found + ABOVE, passed, sem="relaxed")
        if below > 0:
            tl.atomic_add(SUMS + place * 2 + 1, below, sem="relaxed")
        count = tl.sum(kept.to(tl.int32), 0)
        if count > 0:
            at = tl.atomic_add(found + COUNT, count, sem="relaxed") + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(DEPTHS + place * ROOM + at, deep, mask=kept & (at < ROOM))


@triton.jit
def select(
    LOGITS, WORK, WHERE, SLOTS, REALS, WHOLES, WHICH, TOP, LIMIT, FOUND, SUMS, DEPTHS, CUTS, stride, vocab,
    EDITED: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The cut of row WHICH[program], exactly: CUTS [which], bits of the largest depth that stays."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0)
    row = tl.load(WHICH + place).to(tl.int32)
    slot = tl.load(SLOTS + row).to(tl.int32)
    top_k, top_p = tl.load(WHOLES + slot * WIDE + TOP_K), tl.load(REALS + slot * WIDE + TOP_P)
    some = (top_k > 0) & (top_k < vocab)
    above, count = tl.load(FOUND + place * FACTS + ABOVE), tl.load(FOUND + place * FACTS + COUNT)
    limit = tl.load(LIMIT + row)
    lost = (count > ROOM) | ((above >= top_k) & some)
    if (lost == 0) & (count > 0):
        i = tl.arange(0, ROOM)
        deep = tl.load(DEPTHS + place * ROOM + i, mask=i < count, other=NONE)
        if some:
            limit = nth(deep, limit, top_k - above)
        if top_p < 1.0:
            before, behind = tl.load(SUMS + place * 2), tl.load(SUMS + place * 2 + 1)
            behind = tl.where(some, 0, behind)
            chances = whole(deep, deep <= limit)
            mine = tl.sum(chances, 0)
            need = top_p * (before + mine + behind).to(tl.float64)
            lost = (before.to(tl.float64) >= need) | ((before + mine).to(tl.float64) < need)
            if lost == 0:
                limit = heavy(deep, chances, limit, before, need)
    if lost & (tl.load(TOP + row) > NEVER):
        limit = searched(LOGITS, WORK, WHERE, row, stride, vocab, tl.load(TOP + row), cold(REALS, slot),
                         tl.load(LIMIT + row), some, top_k, top_p, EDITED, BLOCK)  # fmt: skip
    tl.store(CUTS + place, limit)


@triton.jit
def heavy(deep, chances, limit, before, need):
    """The smallest depth down to which chances, with those before, add up to what is needed."""
    low = tl.minimum(tl.min(deep, 0), limit)
    while low < limit:
        middle = low + (limit - low) // 2
        if (before + tl.sum(tl.where(deep <= middle, chances, 0), 0)).to(tl.float64) >= need:
            limit = middle
        else:
            low = middle + 1
    return limit


@triton.jit
def weigh(LOGITS, WORK, WHERE, row, stride, vocab, top, temperature, limit,
          MASS: tl.constexpr, EDITED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """How many logits lie at most `limit` deep; with MASS, what their chances add up to."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        deep = depth(read(LOGITS, WORK, WHERE, row, stride, vocab, i, EDITED), top, temperature)
        inside = deep <= limit
        if MASS:
            total += whole(deep, inside)
        else:
            total += inside.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def searched(LOGITS, WORK, WHERE, row, stride, vocab, top, temperature, limit, some, top_k, top_p,
             EDITED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The same cut from the whole row, by bisection: for rows whose cut lies elsewhere than was thought."""
    if some:
        low = 0
        while low < limit:
            middle = low + (limit - low) // 2
            found = weigh(
                LOGITS, WORK, WHERE, row, stride, vocab, top, temperature, middle, False, EDITED, BLOCK
            )
            if found >= top_k:
                limit = middle
            else:
                low = middle + 1
    if top_p < 1.0:
        total = weigh(LOGITS, WORK, WHERE, row, stride, vocab, top, temperature, limit, True, EDITED, BLOCK)
        need = top_p * total.to(tl.float64)
        low = 0
        while low < limit:
            middle = low + (limit - low) // 2
            found = weigh(
                LOGITS, WORK, WHERE, row, stride, vocab, top, temperature, middle, True, EDITED, BLOCK
            )
            if found.to(tl.float64) >= need:
                limit = middle
            else:
                low = middle + 1
    return limit


def samples() -> list[Sample]:
    """Indices as a GPU has them; logits of two dtypes."""
    words = ("WHERE", "SLOTS", "WHICH", "LIMIT", "FOUND", "DEPTHS", "CUTS")
    types = dict.fromkeys(words, "*i32") | {
        "WHOLES": "*i64",
        "REALS": "*fp64",
        "SUMS": "*i64",
        "HISTOGRAM": "*i64",
    }
    types |= dict.fromkeys(("WORK", "TOPS", "TOP"), "*fp32") | dict.fromkeys(
        ("stride", "vocab", "chunks"), "i32"
    )
    made = []
    for logits, edited in (("*fp32", False), ("*bf16", True)):
        both = types | {"LOGITS": logits}
        constants = {"EDITED": edited, "CHUNKS": 4, "BLOCK": 4096, "ROOM": 8192}
        for kernel, warps in ((spread, 8), (bracket, 8), (collect, 8), (select, 16)):
            names = kernel.arg_names
            found = {name: both[name] for name in names if name in both}
            mine = {name: constants[name] for name in names if name in constants}
            made.append(Sample(kernel, found, mine, {"num_warps": warps}))
    return made
