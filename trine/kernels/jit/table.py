"""The table's operations, one launch each, but two for ragged rows.

Counts of a slot lie in its record (kernels/table/base.py): KNOWN, COMPUTED and so on are places in it. Offsets
into the arena fit in 32 bits. Slot 0 has no tenant and is never changed.
"""

import triton
import triton.language as tl

from . import Sample

KNOWN = tl.constexpr(0)
COMPUTED = tl.constexpr(1)


@triton.jit
def apply(ARENA, RECORDS, WORDS, at, RECORD: tl.constexpr, PIECE: tl.constexpr):
    """One run of words for each program; the runs are described from word `at` on."""
    run = WORDS + at + tl.program_id(0) * 4
    target, source, count, slot = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
    i = tl.arange(0, PIECE)
    if slot >= 0:  # nobody else of this launch reads or changes what is known of it
        known = tl.load(RECORDS + slot * RECORD + KNOWN)
        target += known
        tl.debug_barrier()
        tl.store(RECORDS + slot * RECORD + KNOWN, known + count)
    tl.store(ARENA + target + i, tl.load(WORDS + source + i, mask=i < count), mask=i < count)


@triton.jit
def look(TOKENS, PAGES, IDS, POSITIONS, WRITE, slot, position, i, ok, total, positions, slots, width,
         GROUPS: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """What is at these positions of these slots, to place i of the results."""
    token = tl.load(TOKENS + slot * positions + position, mask=ok & (slot > 0), other=0)
    tl.store(IDS + i, token.to(IDS.dtype.element_ty), mask=ok)
    tl.store(POSITIONS + i, position.to(POSITIONS.dtype.element_ty), mask=ok)
    for group in tl.static_range(GROUPS):
        page = tl.load(
            PAGES + (group * slots + slot) * width + position // PAGE, mask=ok & (slot > 0), other=0
        )
        place = page * PAGE + position % PAGE
        tl.store(WRITE + group * total + i, place.to(WRITE.dtype.element_ty), mask=ok)


@triton.jit
def singles(
    TOKENS, PAGES, RECORDS, SLOTS, IDS, POSITIONS, WRITE, LENGTHS, rows, positions, slots, width,
    RECORD: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The next token of BLOCK rows, which is computed from now on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < rows
    slot = tl.load(SLOTS + i, mask=ok, other=0).to(tl.int32)
    real = ok & (slot > 0)
    position = tl.load(RECORDS + slot * RECORD + COMPUTED, mask=real, other=0)
    look(
        TOKENS,
        PAGES,
        IDS,
        POSITIONS,
        WRITE,
        slot,
        position,
        i,
        ok,
        rows,
        positions,
        slots,
        width,
        GROUPS,
        PAGE,
    )
    length = position + real.to(tl.int32)
    tl.store(LENGTHS + i, length.to(LENGTHS.dtype.element_ty), mask=ok)
    tl.store(RECORDS + slot * RECORD + COMPUTED, length, mask=real)


@triton.jit
def reach(RECORDS, SLOTS, STARTS, LENGTHS, BEGINS, rows,
          RECORD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Rows of any count: their lengths, and what turns a place in the step into a position."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < rows
    slot = tl.load(SLOTS + i, mask=ok, other=0).to(tl.int32)
    start = tl.load(STARTS + i, mask=ok, other=0).to(tl.int32)
    stop = tl.load(STARTS + i + 1, mask=ok, other=0).to(tl.int32)
    before = tl.load(RECORDS + slot * RECORD + COMPUTED, mask=ok & (slot > 0), other=0)
    length = before + stop - start
    tl.store(BEGINS + i, before - start, mask=ok)
    tl.store(LENGTHS + i, length.to(LENGTHS.dtype.element_ty), mask=ok)
    tl.store(RECORDS + slot * RECORD + COMPUTED, length, mask=ok & (slot > 0))


@triton.jit
def ragged(
    TOKENS, PAGES, SLOTS, OWNER, BEGINS, IDS, POSITIONS, WRITE, total, positions, slots, width,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens, each with its owner: the row it belongs to."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < total
    row = tl.load(OWNER + i, mask=ok, other=0).to(tl.int32)
    slot = tl.load(SLOTS + row, mask=ok, other=0).to(tl.int32)
    position = tl.load(BEGINS + row, mask=ok, other=0) + i
    look(
        TOKENS,
        PAGES,
        IDS,
        POSITIONS,
        WRITE,
        slot,
        position,
        i,
        ok,
        total,
        positions,
        slots,
        width,
        GROUPS,
        PAGE,
    )


@triton.jit
def append(TOKENS, RECORDS, SLOTS, ADDED, rows, positions,
           RECORD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token behind those of each slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(SLOTS + i, mask=i < rows, other=0).to(tl.int32)
    real = slot > 0
    known = tl.load(RECORDS + slot * RECORD + KNOWN, mask=real, other=0)
    token = tl.load(ADDED + i, mask=real, other=0).to(tl.int32)
    tl.store(TOKENS + slot * positions + known, token, mask=real)
    tl.store(RECORDS + slot * RECORD + KNOWN, known + 1, mask=real)


def samples() -> list[Sample]:
    """As a GPU calls them: all indices are int32."""
    few, table = {"BLOCK": 64}, {"GROUPS": 2, "PAGE": 16}
    sizes = dict.fromkeys(("positions", "slots", "width"), "i32")

    def words(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, "*i32")

    return [
        Sample(apply, words("ARENA", "RECORDS", "WORDS") | {"at": "i32"}, {"RECORD": 24, "PIECE": 1024}),
        Sample(
            singles,
            words("TOKENS", "PAGES", "RECORDS", "SLOTS", "IDS", "POSITIONS", "WRITE", "LENGTHS")
            | {"rows": "i32"} | sizes,
            {"RECORD": 24} | table | few,
            {"num_warps": 2},
        ),
        Sample(
            reach,
            words("RECORDS", "SLOTS", "STARTS", "LENGTHS", "BEGINS") | {"rows": "i32"},
            {"RECORD": 24} | few,
            {"num_warps": 2},
        ),
        Sample(
            ragged,
            words("TOKENS", "PAGES", "SLOTS", "OWNER", "BEGINS", "IDS", "POSITIONS", "WRITE")
            | {"total": "i32"} | sizes,
            table | few,
            {"num_warps": 2},
        ),
        Sample(
            append,
            words("TOKENS", "RECORDS", "SLOTS", "ADDED") | {"rows": "i32", "positions": "i32"},
            {"RECORD": 24} | few,
            {"num_warps": 2},
        ),
    ]  # fmt: skip
