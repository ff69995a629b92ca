"""The compiled kernels, as this processor can run them: structures and functions of `src`, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from trine.errors import Unsupported

from . import build

GROUP = 32  # inputs that share a scale
RUN = 256  # positions whose softmax is its own


class Weights(Structure):
    """See src/product.h."""

    _fields_ = [("data", c_void_p), ("outs", c_int32), ("ins", c_int32), ("bits", c_int32)]


class Op(Structure):
    """See src/program.cpp; a, b, c, d, x and p.. are as each kind says there."""

    _fields_ = [
        *((name, c_int32) for name in ("kind", "into", "more", "out", "a", "b", "c", "d")),
        ("x", c_float),
        ("flags", c_int32),
        *((name, c_void_p) for name in ("p", "p2", "p3", "p4")),
    ]


class Buffer(Structure):
    _fields_ = [("width", c_int32), ("quantized", c_int32)]


class Group(Structure):
    """Of KV: `Shape` of src/attention.h."""

    _fields_ = [(name, c_int32) for name in ("heads", "kv_heads", "dim", "page", "window")] + [
        ("scale", c_float)
    ]


class Step(Structure):
    """See src/attention.h."""

    _fields_ = [
        *((name, c_int32) for name in ("tokens", "rows", "wanted")),
        *((name, c_void_p) for name in ("ids", "positions", "starts", "lengths", "slots", "picked")),
        *((name, c_void_p) for name in ("write", "pages", "widths", "logits")),
    ]


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "trine_pool": (c_void_p, (c_int,)),
    "trine_pool_end": (None, (c_void_p,)),
    "trine_program": (
        c_void_p,
        (c_void_p, POINTER(Op), c_int, POINTER(Buffer), c_int, POINTER(Group), c_int, c_int),
    ),
    "trine_program_end": (None, (c_void_p,)),
    "trine_share": (None, (c_void_p, c_int, c_int, *(c_void_p,) * 4, c_int)),
    "trine_step": (None, (c_void_p, POINTER(Step))),
    "trine_pack": (None, (c_int, c_void_p, c_size_t, c_int64, c_void_p, c_int64, c_int, c_int)),
    "trine_unpack": (None, (POINTER(Weights), c_void_p)),
    "trine_bytes": (c_int64, (c_int, c_int, c_int)),
    "trine_choose": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "trine_see": (
        None,
        (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
    ),
    "trine_table_apply": (c_int64, (c_void_p, c_void_p, c_int64, c_int64)),
    "trine_table_singles": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p)),
    "trine_table_ragged": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p)),
    "trine_table_append": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
}


def load() -> ctypes.CDLL:
    """Unsupported, with the reason, if there is none for this processor."""
    found = _load()
    if isinstance(found, str):
        raise Unsupported(found)
    return found


def cannot(device: str = "cpu") -> str | None:
    """Why there is none, or why it serves no such device."""
    if device != "cpu":
        return f"is for a CPU, not {device}"
    found = _load()
    return found if isinstance(found, str) else None


def name() -> str:
    """The instruction set whose library is loaded."""
    return Path(load()._name).name.rpartition("-")[0]


@cache
def _load() -> ctypes.CDLL | str:
    mark, words = build.fingerprint(), _words()
    for name, (needed, _) in build.SETS.items():
        if needed and not words.issuperset(needed):
            continue
        if (path := build.path(name, mark)).exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                return f"{path.name} cannot be loaded: {error}"
            for function, (result, arguments) in FUNCTIONS.items():
                found = getattr(library, function)
                found.restype, found.argtypes = result, arguments
            return library
    return (
        "the native kernels are not compiled (python -m trine.kernels.native.build; it needs a C++ compiler)"
    )


def _words() -> set[str]:
    """What the processor says it can."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
