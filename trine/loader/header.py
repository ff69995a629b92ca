"""The header of a GGUF file: metadata and the list of tensors, read with suspicion.

A GGUF file comes from a stranger. Every count, length, offset, alignment, type and dimension is
checked against the size of the file, and against the limits below, before anything is made of it;
sizes are Python integers, so no product wraps. What is wrong is a CheckpointError that names the field.
Versions 2 and 3, little endian. Plain Python: it also runs in the sandbox child.

It does not know what the keys mean, nor how to turn blocks into numbers.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from ..errors import CheckpointError
from .files import open_regular

HEADER_BYTES = 128 * 2**20  # all of metadata and tensor list
KEYS = 2**14
TENSORS = 2**16
ITEMS = 2**21  # of an array
KEY_BYTES = 2**16 - 1
NAME_BYTES = 64  # of a tensor
TEXT_BYTES = 4 * 2**20  # of a value that is a string: chat templates
ENTRY_BYTES = 2**16  # of a string in an array: tokens, merges
DIMENSIONS = 4
ALIGNMENT = 2**20
CHUNK = 2**20  # bytes read at a time

# Type number of a value -> struct letter.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

# Type number of a tensor -> name, values in a block, bytes of a block.
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}


class TensorInfo(Struct, frozen=True, array_like=True):
    """One tensor. `shape` is outermost first, as numpy and torch count; `offset` is from the file's start."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class Header(Struct, frozen=True, array_like=True):
    """All that a GGUF file says before its data."""

    version: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_offset: int


def read(path: Path | str) -> Header:
    """The header of the file at `path`; CheckpointError names the field that is wrong."""
    with open_regular(Path(path)) as file:
        return _Parser(file, str(path)).header()


def read_safely(path: Path | str) -> Header:
    """`read`, in a child process with limits on time and memory. The last one is kept, while its file stays
    as it is: a start asks several times, and nobody changes what is in it."""
    path = Path(path).absolute()  # the child is elsewhere
    try:
        found = path.stat()
    except OSError:
        return _read_safely(path, ())
    return _kept(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


def forget() -> None:
    """The one that is kept: it has every token of a vocabulary."""
    _kept.cache_clear()


def _read_safely(path: Path, version: tuple[int, ...]) -> Header:
    """`version`: what tells the file from one that has its name later."""
    from ..sandbox import Sandbox, SandboxError

    try:
        with Sandbox(1) as sandbox:
            raw = sandbox.call("gguf.header", str(path), cpu=10, wall=30, memory=512 * 2**20)
        return msgspec.convert(raw, Header)
    except (SandboxError, msgspec.ValidationError) as error:
        told = (
            str(error) if getattr(error, "kind", "") == "CheckpointError" else f"{path}: the header: {error}"
        )
        raise CheckpointError(told) from None


_kept = lru_cache(maxsize=1)(_read_safely)


class _Parser:
    """A cursor over the file; `data` holds what was read so far, from the start."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.file = file
        self.path = path
        self.size = file.seek(0, 2)
        file.seek(0)
        self.data = bytearray()
        self.at = 0

    def header(self) -> Header:
        version = self._version()
        tensor_count = self._count("tensor count", TENSORS, least=24)
        key_count = self._count("metadata count", KEYS, least=13)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string("metadata key", KEY_BYTES)
            if key in metadata:
                raise self._bad(f"metadata key {key!r}", "appears twice")
            metadata[key] = self._value(f"metadata {key!r}")
        entries = [self._tensor(i) for i in range(tensor_count)]
        alignment = self._alignment(metadata)
        start = -(-self.at // alignment) * alignment
        return Header(version, metadata, self._placed(entries, start, alignment), start)

    def _version(self) -> int:
        if self.size < 24:
            raise self._bad("size", f"is {self.size} bytes, a GGUF file has at least 24")
        if (magic := bytes(self._take(4, "magic"))) != b"GGUF":
            raise self._bad("magic", f"is {magic!r}, a GGUF file starts with b'GGUF'")
        version = self._number("I", "version")
        if version in (2 << 24, 3 << 24):
            raise self._bad("version", "is big endian; convert the file to little endian")
        if version not in (2, 3):
            raise self._bad("version", f"is {version}; versions 2 and 3 can be read")
        return version

    def _count(self, what: str, most: int, least: int) -> int:
        """A number of things of at least `least` bytes each, that must still fit in the file."""
        count = self._number("Q", what)
        if count > most:
            raise self._bad(what, f"is {count}, the limit is {most}")
        if count * least > self.size - self.at:
            raise self._bad(what, f"is {count}, but only {self.size - self.at} bytes follow")
        return count

    def _value(self, what: str) -> Any:
        kind = self._number("I", f"{what} type")
        if kind == STRING:
            return self._string(what, TEXT_BYTES)
        if kind == ARRAY:
            return self._array(what)
        if kind not in NUMBERS:
            raise self._bad(f"{what} type", f"is {kind}, which no version of the format has")
        return self._bool(what) if kind == BOOL else self._number(NUMBERS[kind], what)

    def _array(self, what: str) -> list[Any]:
        kind = self._number("I", f"{what} item type")
        if kind == STRING:
            return self._strings(self._count(f"{what} length", ITEMS, least=8), what)
        if kind == ARRAY:
            raise self._bad(what, "is an array of arrays, which is not supported")
        if kind not in NUMBERS:
            raise self._bad(f"{what} item type", f"is {kind}, which no version of the format has")
        width = struct.calcsize("<" + NUMBERS[kind])
        count = self._count(f"{what} length", ITEMS, least=width)
        raw = self._take(count * width, what)
        if kind == BOOL and raw.count(0) + raw.count(1) != count:
            raise self._bad(what, "holds a bool that is neither 0 nor 1")
        return list(struct.unpack(f"<{count}{NUMBERS[kind]}", raw))

    def _strings(self, count: int, what: str) -> list[str]:
        """The hot loop: a vocabulary has 50,000 to 300,000 entries, twice."""
        out: list[str] = []
        length_of = struct.Struct("<Q").unpack_from
        data, at = self.data, self.at  # `data` only grows in place
        try:
            for _ in range(count):
                if at + 8 > len(data):
                    self._fill(at + 8, what)
                length = length_of(data, at)[0]
                if length > ENTRY_BYTES:
                    raise self._bad(f"{what}[{len(out)}] length", f"is {length}, the limit is {ENTRY_BYTES}")
                at += 8 + length
                if at > len(data):
                    self._fill(at, f"{what}[{len(out)}]")
                out.append(data[at - length : at].decode())
        except UnicodeDecodeError:
            raise self._bad(f"{what}[{len(out)}]", "is not UTF-8") from None
        self.at = at
        return out

    def _tensor(self, index: int) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string(f"tensor {index} name", NAME_BYTES)
        what = f"tensor {name!r}"
        count = self._number("I", f"{what} dimension count")
        if not 1 <= count <= DIMENSIONS:
            raise self._bad(f"{what} dimension count", f"is {count}, it must be 1 to {DIMENSIONS}")
        shape = struct.unpack(f"<{count}Q", self._take(8 * count, f"{what} dimensions"))
        kind = self._number("I", f"{what} type")
        return name, kind, shape[::-1], self._number("Q", f"{what} offset")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if not isinstance(value, int) or not 8 <= value <= ALIGNMENT or value & (value - 1):
            raise self._bad(
                "general.alignment", f"is {value!r:.40}, it must be a power of 2, 8 to {ALIGNMENT}"
            )
        return value

    def _placed(
        self, entries: list[tuple[str, int, tuple[int, ...], int]], start: int, alignment: int
    ) -> list[TensorInfo]:
        """The tensors with their place in the file: inside it, aligned, named once, apart from each other."""
        found: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in entries:
            what = f"tensor {name!r}"
            if name in found:
                raise self._bad(what, "appears twice")
            count = self._tensor_bytes(what, kind, shape)
            if offset % alignment:
                raise self._bad(f"{what} offset", f"is {offset}, not a multiple of the alignment {alignment}")
            if start + offset + count > self.size:
                end = start + offset + count
                raise self._bad(f"{what} offset", f"puts its end at {end}, the file has {self.size} bytes")
            found[name] = TensorInfo(name, BLOCKS[kind][0], shape, start + offset, count)
        before: TensorInfo | None = None
        for info in sorted(found.values(), key=lambda info: info.offset):
            if before and before.offset + before.bytes > info.offset:
                raise self._bad(f"tensor {info.name!r} offset", f"overlaps tensor {before.name!r}")
            before = info
        return list(found.values())

    def _tensor_bytes(self, what: str, kind: int, shape: tuple[int, ...]) -> int:
        if kind not in BLOCKS:
            raise self._bad(f"{what} type", f"is {kind}; there are {sorted(BLOCKS)}")
        name, values, size = BLOCKS[kind]
        if shape[-1] % values:
            raise self._bad(f"{what} dimensions", f"have rows of {shape[-1]}; {name} has blocks of {values}")
        count = 1
        for dimension in shape:
            count *= dimension
        if not 0 < count // values * size <= self.size:
            raise self._bad(
                f"{what} dimensions", f"are {list(shape)}, which is none or more than the file has"
            )
        return count // values * size

    def _string(self, what: str, most: int) -> str:
        length = self._number("Q", f"{what} length")
        if length > most:
            raise self._bad(f"{what} length", f"is {length}, the limit is {most}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._bad(what, "is not UTF-8") from None

    def _bool(self, what: str) -> bool:
        if (value := self._number("B", what)) > 1:
            raise self._bad(what, f"is {value}, a bool is 0 or 1")
        return bool(value)

    def _number(self, letter: str, what: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter), what))[0]

    def _take(self, count: int, what: str) -> bytearray:
        self._fill(self.at + count, what)
        self.at += count
        return self.data[self.at - count : self.at]

    def _fill(self, end: int, what: str) -> None:
        """Read on until `end` bytes are here; refuse before reading if the file has no so many."""
        if end > self.size:
            raise self._bad(what, f"needs {end} bytes, the file ends at {self.size}")
        if end > HEADER_BYTES:
            raise self._bad(what, f"is beyond the first {HEADER_BYTES} bytes, the limit of a header")
        while len(self.data) < end:
            if not (piece := self.file.read(CHUNK)):
                raise self._bad(what, "cannot be read: the file became shorter")
            self.data += piece

    def _bad(self, what: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what[:200]} {problem}")
