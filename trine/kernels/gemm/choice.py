"""Which product in Triton is used for a weight and a number of rows on a GPU, and which is left to the library;
how it is measured which of the library's ways is fastest.

All numbers that measurements decide are here. It launches nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from .base import Want

# One row.
BURST = 16384  # bytes of W that a program asks for at once,
LITTLE = 8192  # or, of a weight of less than SIZE numbers
SIZE = 2**25
THREAD = 32  # bytes of W that a thread asks for, about
AHEAD = 0  # programs later whose W is brought near; 0: none
NORMED = 2**23  # numbers of W up to which a norm is done by every program, instead of once before
INPUTS = 32768  # what a program holds in registers

# Few rows. Streaming W through tensor cores in equal shares for all multiprocessors was slower than the library
# at 50 to 256 rows (172 us a layer of an 8B model instead of 139, H200), and starting kernels early beside the
# library's own slows these down; only the head gains.
HEAD = 64  # rows up to which a weight of LARGE outputs or more is Triton's: 257 us instead of 287
LARGE = 65536

# Products of so many rows are done in the library's fastest way, which is measured: fewer are a GEMV, more compute
# so much that its first answer is good, and steps of so many single tokens are rare.
LEAST, MOST = 2, 512
LITTLE_TO_GAIN = 2**20  # numbers of W below which a launch takes as long as the product
WAYS = 8  # that the library is asked for
BETTER = 0.99  # of the usual's time is what a way has to stay below
WORKSPACE = 2**26  # bytes
LAYERS = 16  # whose weights are multiplied in turn, at most,
UNCACHED = 200 * 2**20  # or as many as have so many bytes together: a cache of 50 MB helps nobody then
TURNS, FEW_TURNS = (
    8,
    4,
)  # products from one event to another, at least; few if one W is larger than UNCACHED
FINALISTS, ROUNDS = 2, 2  # ways that are measured again, and how often
HOLD = 3e-4  # seconds in which the host orders 16 products: so long the device waits for them
CLOSE = 0.01  # of the result is how much a way may differ: two roundings to bfloat16 are 0.003
SAMPLE = 4096  # columns of it that are compared

# Rows up to which a kernel starts before the one in front of it is done (PDL): of the GEMV and small ones.
OVERLAP = 1


class Burst(NamedTuple):
    """A GEMV: a program's outputs and warps."""

    outs: int
    warps: int
    ahead: int = 0


class Shape(NamedTuple):
    """Of a tile, and how a program works on it."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int  # of inputs on their way at a time


class Choice:
    """Of one kind of device and weights."""

    def __init__(self, want: Want) -> None:
        self.bytes = 4 if want.weights == "float32" else 2
        self.modern = want.device == "cuda" and want.capability >= (9, 0)  # 227 KiB of shared memory, PDL

    def one(self, outs: int, ins: int, gates: int) -> Burst | None:
        """For one row; `outs` of the result, `gates` rows of W make one."""
        if ins > INPUTS or ins % 8:
            return None
        line = power(ins) * self.bytes * gates
        lines = max(1, (LITTLE if outs * gates * ins < SIZE else BURST) // line)
        return Burst(lines, min(16, max(4, lines * line // (32 * THREAD))), AHEAD)

    def norms(self, outs: int, ins: int) -> bool:
        """Whether a GEMV also does the norm before it."""
        return outs * ins <= NORMED

    def few(self, rows: int, outs: int, ins: int) -> Shape | None:
        """For more rows than one. `outs` are rows of W."""
        if rows > HEAD or outs < LARGE or not self.modern or self.bytes != 2 or ins % 8:
            return None  # tensor cores do not take float32
        return Shape(max(16, power(rows)), 128, 128, 8, 4)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
