"""Choosing tokens: passes over the vocabulary in chunks of CHUNK, and one program a row that puts them together.

A chunk is the same everywhere, and sums that decide are of whole numbers, so no bit of a row depends on the rows
beside it or on how many there are. `said` is [2, rows] int32: ids, codes of errors. Logits that are not finite
count as never. Rows may have been edited: then `where` [rows] says which row of `work` (float32) they are in.

The draw is a race: token i arrives at E_i / p_i, the first one wins. A chunk is run relative to its own largest
logit, so that no temperature can overflow, and winners of chunks run against each other in the logarithm.
"""

import triton
import triton.language as tl

from . import Sample

NEVER = tl.constexpr(float("-inf"))
COLDEST = tl.constexpr(1e-30)  # as the reference has it
RECORD = tl.constexpr(24)  # words of a slot's record, and where its settings are, in words of 64 bits
WIDE = tl.constexpr(12)
TEMPERATURE, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOP_K, SEED = tl.constexpr(0), tl.constexpr(1)
KNOWN = tl.constexpr(0)
LAST = tl.constexpr(0x7FFFFFFF)
# nats, and their bits: what lies deeper can win no race (E is between 2^-32 and 16); all of it together is < 1e-8
DEEPEST = tl.constexpr(0x41FF3333)  # 31.9


@triton.jit
def mix(x):
    """splitmix64's finalizer (Steele, Lea and Flood, 2014) over an unsigned word."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise(seed, position, ids):
    """An exponential variate for each id, the reference's bit for bit up to the logarithm."""
    key = mix(mix(seed.to(tl.uint64)) + 0x9E3779B97F4A7C15 * (position + 1).to(tl.uint64))
    x = ids.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D + (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    u = (x.to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31 * (1.0 - 2.0**-23))
    # -log1p(-u) to the last bits, small u, which win, included: one polynomial (Cephes' logf) for log1p(z),
    # with z = -u where that is near 0, else the mantissa of 1 - u, which is exact
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    small = u < 0.28
    exponent = tl.where(small, 0, (bits - 0x3F3504F3) >> 23)
    z = tl.where(small, -u, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0)
    p = z * 7.0376836292e-2 - 1.1514610310e-1
    p = p * z + 1.1676998740e-1
    p = p * z - 1.2420140846e-1
    p = p * z + 1.4249322787e-1
    p = p * z - 1.6668057665e-1
    p = p * z + 2.0000714765e-1
    p = p * z - 2.4999993993e-1
    p = p * z + 3.3333331174e-1
    z2 = z * z
    return -(z + (p * z * z2 - 0.5 * z2) + exponent.to(tl.float32) * 0.6931471805599453)


@triton.jit
def read(LOGITS, WORK, WHERE, row, stride, vocab, i, EDITED: tl.constexpr):
    """Logits i of a row as float32; what is not finite is never."""
    inside = i < vocab
    if EDITED:
        edited = tl.load(WHERE + row).to(tl.int32)
        if edited >= 0:
            x = tl.load(WORK + edited.to(tl.int64) * vocab + i, mask=inside, other=NEVER)
        else:
            x = tl.load(LOGITS + row.to(tl.int64) * stride + i, mask=inside, other=NEVER).to(tl.float32)
    else:
        x = tl.load(LOGITS + row.to(tl.int64) * stride + i, mask=inside, other=NEVER).to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), x, NEVER)


@triton.jit
def cold(REALS, slot):
    """The temperature a row is divided by."""
    return tl.maximum(tl.load(REALS + slot * WIDE + TEMPERATURE), COLDEST).to(tl.float32)


@triton.jit
def filtered(REALS, WHOLES, slot):
    """Whether top_k, top_p or min_p do something."""
    reals = REALS + slot * WIDE
    return (
        (tl.load(reals + TOP_P) < 1.0)
        | (tl.load(reals + MIN_P) > 0.0)
        | (tl.load(WHOLES + slot * WIDE + TOP_K) > 0)
    )


@triton.jit
def first(values, best, ids):
    """The lowest id among those whose value is the best."""
    return tl.min(tl.where(values == best, ids, LAST), 0)


@triton.jit
def depth(x, top, temperature):
    """How far below the largest, as a whole number that grows with it: bits of a float that is not negative."""
    far = tl.where(x > NEVER, tl.abs(tl.div_rn(x - top, temperature)), float("inf"))
    return far.to(tl.int32, bitcast=True)


@triton.jit
def nth(deep, limit, n):
    """The n-th smallest depth, or the limit if that is less."""
    low = tl.minimum(tl.min(deep, 0), limit)
    while low < limit:
        middle = low + (limit - low) // 2
        if tl.sum((deep <= middle).to(tl.int32), 0) >= n:
            limit = middle
        else:
            low = middle + 1
    return limit


@triton.jit
def race(
    LOGITS, WORK, WHERE, SLOTS, RECORDS, REALS, WHOLES, TOPS, RACES, IDS, stride, vocab, chunks,
    EDITED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk of a row: its largest logit, and its winner. TOPS, RACES, IDS are [rows, chunks]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(SLOTS + row).to(tl.int32)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = read(LOGITS, WORK, WHERE, row, stride, vocab, ids, EDITED)
    top = tl.max(x, 0)
    if (tl.load(REALS + slot * WIDE + TEMPERATURE) > 0.0) & (filtered(REALS, WHOLES, slot) == 0):
        seed, position = tl.load(WHOLES + slot * WIDE + SEED), tl.load(RECORDS + slot * RECORD + KNOWN)
        steep = 1.4426950408889634 / cold(REALS, slot)
        arrival = tl.exp2(tl.where(x > NEVER, (x - top) * steep, NEVER)) / noise(seed, position, ids)
        best = tl.max(arrival, 0)
        winner = first(arrival, best, ids)
    else:
        best = top
        winner = first(x, top, ids)
    at = row * chunks + chunk
    tl.store(TOPS + at, top)
    tl.store(RACES + at, best)
    tl.store(IDS + at, winner)


@triton.jit
def bound(REALS, WHOLES, slot, tops, top, chunks, vocab):
    """How deep a row with filters may go at most, from the largest of each chunk: bits of a depth.

    What min_p leaves; and as deep as the n-th of the chunks, n = top_k, there are at least top_k tokens."""
    min_p = tl.load(REALS + slot * WIDE + MIN_P)
    limit = tl.abs(tl.log(tl.maximum(min_p, 1e-30)).to(tl.float32)).to(tl.int32, bitcast=True)
    limit = tl.minimum(limit, DEEPEST)
    top_k = tl.load(WHOLES + slot * WIDE + TOP_K)
    if (top_k > 0) & (top_k <= chunks) & (top_k < vocab):
        limit = nth(depth(tops, top, cold(REALS, slot)), limit, top_k)
    return limit


@triton.jit
def settle(
    TOPS, RACES, IDS, SLOTS, REALS, WHOLES, WHERE, FLAGS, TOP, LIMIT, SAID, chunks, rows, vocab,
    EDITED: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row: its largest logit, and the winner of winners. Rows with filters get one that is replaced later."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(SLOTS + row).to(tl.int32)
    i = tl.arange(0, CHUNKS)
    tops = tl.load(TOPS + row * chunks + i, mask=i < chunks, other=NEVER)
    ids = tl.load(IDS + row * chunks + i, mask=i < chunks, other=LAST)
    top = tl.max(tops, 0)
    winner = first(tops, top, ids)
    if tl.load(REALS + slot * WIDE + TEMPERATURE) > 0.0:
        races = tl.load(RACES + row * chunks + i, mask=i < chunks, other=1.0)
        there = (tops > NEVER) & (races > 0.0)
        apart = tl.div_rn(tl.where(there, tops, top) - top, cold(REALS, slot))
        score = tl.where(there, apart + tl.log(tl.where(there, races, 1.0)), NEVER)
        winner = first(score, tl.max(score, 0), ids)
    error = 0
    if top == NEVER:
        error = 2
        winner = 0
        if EDITED:
            edited = tl.load(WHERE + row).to(tl.int32)
            # if all that the model gave is finite, it was the edits
            if tl.load(FLAGS + edited, mask=edited >= 0, other=0) == 1:
                error = 1
    if filtered(REALS, WHOLES, slot):
        tl.store(LIMIT + row, bound(REALS, WHOLES, slot, tops, top, chunks, vocab))
    tl.store(TOP + row, top)
    tl.store(SAID + row, winner)
    tl.store(SAID + rows + row, error)


@triton.jit
def race_above(
    LOGITS, WORK, WHERE, SLOTS, RECORDS, REALS, WHOLES, WHICH, TOP, CUTS, TOPS, RACES, IDS, stride, vocab, chunks,
    EDITED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk of row WHICH[program]: its winner of those that are not cut off. RACES and IDS are [which, chunks]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(WHICH + place).to(tl.int32)
    slot = tl.load(SLOTS + row).to(tl.int32)
    temperature, top, limit = cold(REALS, slot), tl.load(TOP + row), tl.load(CUTS + place)
    best = -1.0
    winner = LAST
    highest = tl.load(TOPS + row * chunks + chunk)
    if (highest > NEVER) & (depth(highest, top, temperature) <= limit):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = read(LOGITS, WORK, WHERE, row, stride, vocab, ids, EDITED)
        deep = depth(x, top, temperature)
        seed, position = tl.load(WHOLES + slot * WIDE + SEED), tl.load(RECORDS + slot * RECORD + KNOWN)
        chance = tl.exp(-deep.to(tl.float32, bitcast=True))
        arrival = tl.where((deep <= limit) & (x > NEVER), chance / noise(seed, position, ids), -1.0)
        best = tl.max(arrival, 0)
        winner = first(arrival, best, ids)
    tl.store(RACES + place * chunks + chunk, best)
    tl.store(IDS + place * chunks + chunk, winner)


@triton.jit
def settle_above(
    RACES, IDS, WHICH, TOP, SAID, chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The winner of winners of row WHICH[program]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0)
    row = tl.load(WHICH + place).to(tl.int32)
    i = tl.arange(0, CHUNKS)
    races = tl.load(RACES + place * chunks + i, mask=i < chunks, other=-1.0)
    ids = tl.load(IDS + place * chunks + i, mask=i < chunks, other=LAST)
    if tl.load(TOP + row) > NEVER:
        tl.store(SAID + row, first(races, tl.max(races, 0), ids))


@triton.jit
def ordered(x, ids):
    """A whole number that grows with x, and of equals falls with the id."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # the zero that is negative becomes the other
    bits = bits ^ ((bits >> 31) & LAST)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def unordered(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def see(
    LOGITS, WHICH, SAID, TOPS, SUMS, RANKS, KEYS, stride, vocab, chunks,
    MOST: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk of row WHICH[program], as the model gave it: its largest, its sum, who is before the chosen one,
    and its MOST likeliest as KEYS [which, chunks, MOST]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(WHICH + place).to(tl.int32)
    token = tl.load(SAID + row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = read(LOGITS, LOGITS, LOGITS, row, stride, vocab, ids, False)
    own = read(LOGITS, LOGITS, LOGITS, row, stride, vocab, token, False)
    top = tl.max(x, 0)
    at = place * chunks + chunk
    tl.store(TOPS + at, top)
    tl.store(SUMS + at, tl.sum(tl.exp(tl.where(x > NEVER, x - top, NEVER)), 0))
    before = (ids < vocab) & ((x > own) | ((x == own) & (ids < token)))
    tl.store(RANKS + at, tl.sum(before.to(tl.int32), 0))
    keys = tl.where(ids < vocab, ordered(x, ids), -0x7FFFFFFFFFFFFFFF)
    for n in range(MOST):
        best = tl.max(keys, 0)
        tl.store(KEYS + at * MOST + n, best)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)


@triton.jit
def report(
    LOGITS, WHICH, SAID, TOPS, SUMS, RANKS, KEYS, CHANCES, IDS, stride, vocab, chunks,
    MOST: tl.constexpr, CHUNKS: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row: CHANCES and IDS [which, 1 + MOST]: of the chosen one its rank, then the likeliest."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0)
    row = tl.load(WHICH + place).to(tl.int32)
    i = tl.arange(0, CHUNKS)
    at, there = place * chunks + i, i < chunks
    tops = tl.load(TOPS + at, mask=there, other=NEVER)
    top = tl.max(tops, 0)
    parts = tl.where(tops > NEVER, tl.load(SUMS + at, mask=there, other=0.0) * tl.exp(tops - top), 0.0)
    size = tl.log(tl.sum(parts, 0))  # apart: beside a large `top` nothing would be left of it
    own = read(LOGITS, LOGITS, LOGITS, row, stride, vocab, tl.load(SAID + row), False)
    out = place * (1 + MOST)
    tl.store(CHANCES + out, own - top - size)
    tl.store(IDS + out, 1 + tl.sum(tl.load(RANKS + at, mask=there, other=0), 0))
    if MOST > 0:
        j = tl.arange(0, ALL)
        keys = tl.load(KEYS + place * chunks * MOST + j, mask=j < chunks * MOST, other=-0x7FFFFFFFFFFFFFFF)
        for n in range(MOST):
            best = tl.max(keys, 0)
            tl.store(CHANCES + out + 1 + n, unordered(best) - top - size)
            tl.store(IDS + out + 1 + n, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32))
            keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)


def samples() -> list[Sample]:
    """Indices as a GPU has them; logits of two dtypes."""
    ints = ("WHERE", "SLOTS", "RECORDS", "IDS", "FLAGS", "SAID", "WHICH", "CUTS", "RANKS", "LIMIT")
    types = dict.fromkeys(ints, "*i32") | {"WHOLES": "*i64", "KEYS": "*i64", "REALS": "*fp64"}
    types |= dict.fromkeys(("WORK", "TOPS", "RACES", "TOP", "SUMS", "CHANCES"), "*fp32")
    types |= dict.fromkeys(("stride", "vocab", "chunks", "rows"), "i32")
    wholes = {"CHUNK": 1024, "CHUNKS": 128, "MOST": 20, "ALL": 4096}
    made = []
    for logits, edited in (("*fp32", False), ("*bf16", True)):
        both = types | {"LOGITS": logits}
        constants = wholes | {"EDITED": edited}
        for kernel, warps in (
            (race, 4), (settle, 2), (race_above, 4), (settle_above, 2), (see, 4), (report, 8),
        ):  # fmt: skip
            names = kernel.arg_names
            made.append(
                Sample(
                    kernel,
                    {name: both[name] for name in names if name in both},
                    {name: constants[name] for name in names if name in constants},
                    {"num_warps": warps},
                )
            )
    return made
