"""Writes GGUF files by the format's description, right ones and wrong ones: every number that a hostile file
could lie about is a named field whose place is known. No numpy, no reader's code."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
LETTERS = {U8: "B", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q"}
DENSE, HALF, EIGHT = 0, 1, 8  # tensor types F32, F16, Q8_0

Metadata = list[tuple[str, int, Any]]  # key, type, value; an array's value is (item type, items)
Tensor = tuple[str, tuple[int, ...], int, int, bytes]  # name, dimensions innermost first, type, offset, data


class Field(NamedTuple):
    """A number in the header that says how much follows or where something is."""

    name: str  # as an error must name it
    at: int
    width: int


class File:
    """The bytes of a GGUF file and its fields."""

    def __init__(
        self, metadata: Metadata, tensors: list[Tensor], *, version: int = 3, align: int = 32
    ) -> None:
        self.bytes = bytearray(b"GGUF")
        self.fields: list[Field] = []
        self.number("version", "I", version)
        self.number("tensor count", "Q", len(tensors))
        self.number("metadata count", "Q", len(metadata))
        for key, kind, value in metadata:
            self.text("metadata key", key)
            self.number(f"metadata {key!r} type", "I", kind)
            self.value(f"metadata {key!r}", kind, value)
        for index, (name, dimensions, kind, offset, _) in enumerate(tensors):
            self.text(f"tensor {index} name", name)
            self.number(f"tensor {name!r} dimension count", "I", len(dimensions))
            for dimension in dimensions:
                self.number(f"tensor {name!r} dimensions", "Q", dimension)
            self.number(f"tensor {name!r} type", "I", kind)
            self.number(f"tensor {name!r} offset", "Q", offset)
        self.header = len(self.bytes)
        self.bytes += bytes(-len(self.bytes) % align)
        self.data = len(self.bytes)
        for _, _, _, offset, data in tensors:
            self.bytes += bytes(max(self.data + offset + len(data) - len(self.bytes), 0))
            self.bytes[self.data + offset : self.data + offset + len(data)] = data

    def number(self, name: str, letter: str, value: int | float) -> None:
        self.fields.append(Field(name, len(self.bytes), struct.calcsize(letter)))
        self.bytes += struct.pack("<" + letter, value)

    def text(self, name: str, value: str) -> None:
        raw = value.encode()
        self.number(f"{name} length", "Q", len(raw))
        self.bytes += raw

    def value(self, name: str, kind: int, value: Any) -> None:
        if kind == STRING:
            self.text(name, value)
        elif kind == ARRAY:
            item, items = value
            self.number(f"{name} item type", "I", item)
            self.number(f"{name} length", "Q", len(items))
            for index, entry in enumerate(items):
                if item == STRING:
                    self.text(f"{name}[{index}]", entry)
                else:
                    self.bytes += struct.pack("<" + LETTERS[item], entry)
        elif name == "metadata 'general.alignment'":
            self.number("general.alignment", LETTERS[kind], value)
        else:
            self.bytes += struct.pack("<" + LETTERS[kind], value)

    def changed(self, field: Field, value: int) -> bytes:
        """The file with another number in one field, cut to its width."""
        out = bytearray(self.bytes)
        out[field.at : field.at + field.width] = value.to_bytes(16, "little")[: field.width]
        return bytes(out)

    def __bytes__(self) -> bytes:
        return bytes(self.bytes)


METADATA: Metadata = [
    ("general.architecture", STRING, "llama"),
    ("general.alignment", U32, 32),
    ("llama.block_count", U32, 1),
    ("a.float", F32, 0.5),
    ("a.bool", BOOL, 1),
    ("tokens", ARRAY, (STRING, ["a", "bé", "", "<|end|>"])),
    ("types", ARRAY, (I32, [1, 1, -1, 3])),
    ("flags", ARRAY, (BOOL, [1, 0, 1])),
    ("big", U64, 2**63),
    ("empty", ARRAY, (U8, [])),
]
TENSORS: list[Tensor] = [
    ("a.weight", (32, 2), EIGHT, 0, bytes(range(68))),
    ("b.weight", (3,), DENSE, 96, bytes(12)),
    ("c.weight", (2, 2, 2), HALF, 128, bytes(16)),
    ("d.weight", (4, 1, 1, 1), DENSE, 160, bytes(16)),
]


def small(**options: Any) -> File:
    """A sound file with a value of each kind."""
    return File(METADATA, TENSORS, **options)
