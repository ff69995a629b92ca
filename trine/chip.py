"""GPUs by name: what `plan --device h200` pretends, and how fast a chip reads and computes.

Facts of data sheets, in round numbers: they order choices and set expectations, and nothing needs them exact.
It does not know the machine (platforms do) and needs no torch.
"""

from __future__ import annotations

from msgspec import Struct

GIB = 2**30


class Chip(Struct, frozen=True):
    """One kind of GPU."""

    platform: str  # a file of trine/platforms
    name: str  # as it names itself
    capability: tuple[int, int]
    cores: int  # multiprocessors
    memory: int  # bytes
    rates: Rates


class Rates(Struct, frozen=True):
    """What a large product reaches of it, dense, in 16 bits, and how fast its memory is read."""

    arithmetic: float  # operations a second
    reading: float  # bytes a second

    @property
    def ridge(self) -> float:
        """Operations for each byte: below it reading is what takes the time."""
        return self.arithmetic / self.reading


# About three quarters of the arithmetic and nine tenths of the bandwidth that the vendor states: what large
# products and copies reach (measured on an H200: 690 TFLOP/s and 4.5 TB/s).
CHIPS = {
    "a100": Chip("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * GIB, Rates(240e12, 1.8e12)),
    "h100": Chip("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * GIB, Rates(690e12, 3.0e12)),
    "h200": Chip("cuda", "NVIDIA H200", (9, 0), 132, 140 * GIB, Rates(690e12, 4.5e12)),
    "b200": Chip("cuda", "NVIDIA B200", (10, 0), 148, 180 * GIB, Rates(1600e12, 7.2e12)),
    "mi300x": Chip("rocm", "AMD Instinct MI300X", (9, 4), 304, 192 * GIB, Rates(650e12, 4.2e12)),
}
OTHER = Rates(150e12, 1.0e12)  # a chip that is not in the table: only the ratio matters


def rates(kind: str, chip: str, capability: tuple[int, int]) -> Rates:
    """Of the chip of this name, or one of its generation, or a middling one."""
    same = [c for c in CHIPS.values() if c.platform == kind]
    named = [c for c in same if c.name.split("-")[0] == chip.split("-")[0]]
    found = named or [c for c in same if c.capability == capability]
    return found[0].rates if found else OTHER
