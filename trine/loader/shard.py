"""One safetensors file: its header, checked by us before the library reads the data.

It does not know which model the tensors belong to.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError
from .files import open_regular, parse_json

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 16 * 2**20
DIMENSIONS = 8

# Type -> bytes of one value.
TYPES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


class Entry(NamedTuple):
    """One tensor of the file; `begin` and `end` count from the start of the data."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read(path: Path) -> dict[str, Entry]:
    """The tensors of the file at `path`; CheckpointError names the one that is wrong."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or not 2 <= length <= min(size - 8, HEADER_BYTES):
            raise CheckpointError(
                f"{path}: header length is {length}; the file has {size} bytes, a header at most {HEADER_BYTES}"
            )
        raw = file.read(length)
    entries = {
        name: _entry(f"{path}: tensor {name[:200]!r}", value)
        for name, value in parse_json(raw, f"{path}: header", HEADER_BYTES).items()
        if name != "__metadata__"
    }
    _check_places(path, entries, size - 8 - length)
    return entries


def get(path: Path, name: str) -> torch.Tensor:
    """The tensor `name` of a file that `read` has checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from None


def _entry(what: str, value: Any) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what}: dtype, shape and data_offsets are wanted, it has {str(value)[:100]}")
    type, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(type, str) or type not in TYPES:
        raise CheckpointError(f"{what}: dtype is {str(type)[:40]!r}; known are {', '.join(TYPES)}")
    if not _naturals(shape) or len(shape) > DIMENSIONS:
        raise CheckpointError(f"{what}: shape is {str(shape)[:100]}, not at most {DIMENSIONS} whole numbers")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{what}: data_offsets is {str(offsets)[:100]}, not two whole numbers")
    begin, end = offsets
    if end - begin != prod(shape) * TYPES[type]:
        raise CheckpointError(
            f"{what}: {type} of shape {str(shape)[:100]} has {prod(shape) * TYPES[type]} bytes, "
            f"data_offsets leave it {end - begin}"
        )
    return Entry(type, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _check_places(path: Path, entries: dict[str, Entry], size: int) -> None:
    """Each byte of the data belongs to one tensor."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            problem = "overlaps the one before" if entry.begin < at else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {name[:200]!r}: data_offsets begin at {entry.begin}: {problem}"
            )
        at = entry.end
    if at != size:
        raise CheckpointError(f"{path}: the tensors have {at} bytes, the file holds {size}")
