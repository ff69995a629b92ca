"""Changes of logits before the draw, for the rows that ask: a copy of each in float32, then its lists, then what
its own tokens cost it. Order: allowed ids, ids that would end it too early, biases, penalties.
"""

import triton
import triton.language as tl

from . import Sample

NEVER = tl.constexpr(float("-inf"))
RECORD = tl.constexpr(24)  # words of a slot's record, and where its settings are, in words of 64 bits
WIDE = tl.constexpr(12)
REPETITION, PRESENCE, FREQUENCY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
MIN_TOKENS = tl.constexpr(2)
KNOWN, PROMPT = tl.constexpr(0), tl.constexpr(2)


@triton.jit
def bare(LOGITS, EDITED_ROWS, RESTRICTED, WORK, FLAGS, stride, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """A chunk of a row that is to be edited: a copy, or never where only some ids are allowed. FLAGS tells
    whether it has numbers (1) and others (2)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(1)
    row = tl.load(EDITED_ROWS + place).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = i < vocab
    x = tl.load(LOGITS + row * stride + i, mask=inside, other=NEVER).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    odd = inside & (x != NEVER) & (finite == 0)
    flag = tl.max(finite.to(tl.int32), 0) + 2 * tl.max(odd.to(tl.int32), 0)
    tl.atomic_or(FLAGS + place, flag)
    keep = finite & (tl.load(RESTRICTED + place) == 0)
    tl.store(WORK + place.to(tl.int64) * vocab + i, tl.where(keep, x, NEVER), mask=inside)


@triton.jit
def change(
    LOGITS, EDITED_ROWS, SLOTS, RECORDS, WHOLES, LISTS, WORK, stride, vocab, edits, entries,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The lists of one row: ids that are allowed, ids that end it if it is too early, and biases.

    LISTS: [3, edits + 1] where each row's lists begin, then ids [entries], then bits of float32 [entries]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0)
    row = tl.load(EDITED_ROWS + place).to(tl.int32)
    slot = tl.load(SLOTS + row).to(tl.int32)
    work, logits = WORK + place.to(tl.int64) * vocab, LOGITS + row.to(tl.int64) * stride
    begin, step = LISTS + place, edits + 1
    names, values = LISTS + 3 * step, LISTS + 3 * step + entries
    for start in range(tl.load(begin).to(tl.int32), tl.load(begin + 1).to(tl.int32), BLOCK):
        i = start + tl.arange(0, BLOCK)
        id = tl.load(names + i, mask=i < tl.load(begin + 1), other=vocab).to(tl.int32)
        x = tl.load(logits + id, mask=id < vocab, other=NEVER).to(tl.float32)
        tl.store(work + id, tl.where(tl.abs(x) < float("inf"), x, NEVER), mask=id < vocab)
    tl.debug_barrier()
    made = tl.load(RECORDS + slot * RECORD + KNOWN) - tl.load(RECORDS + slot * RECORD + PROMPT)
    if made < tl.load(WHOLES + slot * WIDE + MIN_TOKENS):
        for start in range(tl.load(begin + step).to(tl.int32), tl.load(begin + step + 1).to(tl.int32), BLOCK):
            i = start + tl.arange(0, BLOCK)
            id = tl.load(names + i, mask=i < tl.load(begin + step + 1), other=vocab).to(tl.int32)
            tl.store(work + id, tl.full([BLOCK], NEVER, tl.float32), mask=id < vocab)
    tl.debug_barrier()
    begin += 2 * step
    for start in range(tl.load(begin).to(tl.int32), tl.load(begin + 1).to(tl.int32), BLOCK):
        i = start + tl.arange(0, BLOCK)
        id = tl.load(names + i, mask=i < tl.load(begin + 1), other=vocab).to(tl.int32)
        x = tl.load(work + id, mask=id < vocab, other=0.0)
        more = tl.load(values + i, mask=id < vocab, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(work + id, x + more, mask=id < vocab)


@triton.jit
def penalize(
    EDITED_ROWS, SLOTS, RECORDS, REALS, TOKENS, WORK, vocab, positions,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk of an edited row: what repeats counts, found by looking through the row's tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place, low = tl.program_id(1), tl.program_id(0) * CHUNK
    slot = tl.load(SLOTS + tl.load(EDITED_ROWS + place).to(tl.int32)).to(tl.int32)
    reals = REALS + slot * WIDE
    repetition = tl.load(reals + REPETITION).to(tl.float32)
    presence, frequency = tl.load(reals + PRESENCE).to(tl.float32), tl.load(reals + FREQUENCY).to(tl.float32)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        known, prompt = tl.load(RECORDS + slot * RECORD + KNOWN), tl.load(RECORDS + slot * RECORD + PROMPT)
        seen = tl.zeros([CHUNK], tl.int32)
        output = tl.zeros([CHUNK], tl.int32)
        begin = tl.where(repetition != 1.0, 0, prompt // BLOCK * BLOCK)
        for start in range(begin, known, BLOCK):
            i = start + tl.arange(0, BLOCK)
            id = tl.load(TOKENS + slot * positions + i, mask=i < known, other=-1) - low
            here = (id >= 0) & (id < CHUNK)
            if tl.max(here.to(tl.int32), 0) > 0:
                id = tl.where(here, id, 0)
                seen += tl.histogram(id, CHUNK, mask=here)
                output += tl.histogram(id, CHUNK, mask=here & (i >= prompt))
        i = low + tl.arange(0, CHUNK)
        at = WORK + place.to(tl.int64) * vocab + i
        x = tl.load(at, mask=i < vocab, other=0.0)
        less = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(seen > 0, less, x)  # nothing changes where it is 1
        x = tl.where(output > 0, x - (output.to(tl.float32) * frequency + presence), x)
        tl.store(at, x, mask=i < vocab)


def samples() -> list[Sample]:
    """Indices as a GPU has them; logits of two dtypes."""
    types = dict.fromkeys(
        ("EDITED_ROWS", "RESTRICTED", "FLAGS", "SLOTS", "RECORDS", "LISTS", "TOKENS"), "*i32"
    )
    types |= {"WHOLES": "*i64", "REALS": "*fp64", "WORK": "*fp32"}
    types |= dict.fromkeys(("stride", "vocab", "edits", "entries", "positions"), "i32")
    made = []
    for logits in ("*fp32", "*bf16"):
        both = types | {"LOGITS": logits}
        for kernel in (bare, change, penalize):
            names = kernel.arg_names
            constants = {name: 1024 for name in ("CHUNK", "BLOCK") if name in names}
            found = {name: both[name] for name in names if name in both}
            made.append(Sample(kernel, found, constants, {"num_warps": 4}))
    return made
