"""Blocks of a GGUF file to float32 numbers, with numpy.

A format is a struct of bytes (`LAYOUTS`) and a formula from that struct to its values; each formula
rounds in the order that the reference implementation of the format does, so results are equal bit for bit.
It does not know files, names or shapes of a model.

Formats: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp (MIT);
MXFP4 and the eight-bit floats: OCP Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .grids import IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, grid
from .header import BLOCKS

Blocks = NDArray[Any]  # of a dtype of LAYOUTS
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PIECE = 2**17  # values made at a time: what lies between stays in the cache of a core

# fmt: off
LAYOUTS: dict[str, list[tuple[Any, ...]]] = {
    "F32": [("q", "<f4")],
    "F16": [("q", "<f2")],
    "BF16": [("q", "<u2")],
    "Q4_0": [("d", "<f2"), ("q", "u1", 16)],
    "Q4_1": [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)],
    "Q5_0": [("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)],
    "Q5_1": [("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)],
    "Q8_0": [("d", "<f2"), ("q", "i1", 32)],
    "Q2_K": [("s", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("m", "<f2")],
    "Q3_K": [("high", "u1", 32), ("q", "u1", 64), ("s", "u1", 12), ("d", "<f2")],
    "Q4_K": [("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", 128)],
    "Q5_K": [("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)],
    "Q6_K": [("q", "u1", 128), ("high", "u1", 64), ("s", "i1", 16), ("d", "<f2")],
    "TQ1_0": [("q", "u1", 32), ("q2", "u1", 16), ("q3", "u1", 4), ("d", "<f2")],
    "TQ2_0": [("q", "u1", 64), ("d", "<f2")],
    "MXFP4": [("d", "u1"), ("q", "u1", 16)],
    "NVFP4": [("d", "u1", 4), ("q", "u1", 32)],
    "IQ2_XXS": [("d", "<f2"), ("q", [("at", "u1", 4), ("rest", "<u4")], 8)],
    "IQ2_XS": [("d", "<f2"), ("q", "<u2", 32), ("s", "u1", 8)],
    "IQ2_S": [("d", "<f2"), ("q", "u1", 32), ("sign", "u1", 32), ("high", "u1", 8), ("s", "u1", 8)],
    "IQ3_XXS": [("d", "<f2"), ("q", "u1", 64), ("rest", "<u4", 8)],
    "IQ3_S": [("d", "<f2"), ("q", "u1", 64), ("high", "u1", 8), ("sign", "u1", 32), ("s", "u1", 4)],
    "IQ1_S": [("d", "<f2"), ("q", "u1", 32), ("high", "<u2", 8)],
    "IQ1_M": [("q", "u1", 32), ("high", "u1", 16), ("s", "<u2", 4)],
    "IQ4_NL": [("d", "<f2"), ("q", "u1", 16)],
    "IQ4_XS": [("d", "<f2"), ("high", "<u2"), ("s", "u1", 4), ("q", "u1", 128)],
}
# fmt: on

# The values of four-bit codes: a curve fitted to weights, and E2M1 doubled.
CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# Eight-bit scales by code, halved because E2M1 is doubled: powers of two, and E4M3 without a sign.
E8M0 = np.ldexp(np.ones(256, np.float32), np.arange(256) - 128).astype(np.float32)
E4M3 = np.array(
    [(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 8) for e in range(16) for m in range(8)] * 2, np.float32
)
E4M3[127] = 0  # not a number in the format; the reference takes it for none
# Seven bits of signs stand for eight: their sum is even.
EVEN_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)


def dequantize(raw: Bytes, type: str, shape: tuple[int, ...]) -> Floats:
    """The tensor of `shape` that the bytes `raw` of a GGUF type hold."""
    if type not in FORMULAS:
        raise CheckpointError(f"GGUF type {type} holds no weights that can be read; {sorted(FORMULAS)} can")
    layout = np.dtype(LAYOUTS[type])
    blocks = raw.reshape(-1).view(layout)
    values = next(count for name, count, _ in BLOCKS.values() if name == type)
    if blocks.size * values != prod(shape):
        raise CheckpointError(f"{blocks.size} blocks of {type} are not a tensor of shape {list(shape)}")
    out = np.empty((blocks.size, values), np.float32)
    step = PIECE // values
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be infinite or NaN: so is the value
        for at in range(0, blocks.size, step):
            out[at : at + step] = FORMULAS[type](blocks[at : at + step])
    return out.reshape(shape)


# ── Taking bits apart ───────────────────────────────────────────────────────────────────────


def _bits(field: NDArray[Any], width: int, run: int) -> Bytes:
    """Codes of `width` bits: of each `run` bytes first their lowest bits, then the next, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = field.reshape(len(field), -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << width) - 1)).reshape(len(field), -1)


def _floats(codes: NDArray[Any], less: int = 0) -> Floats:
    """Codes as floats, less a number that they all carry."""
    out = codes.astype(np.float32)
    if less:
        out -= np.float32(less)
    return out


def _scale(field: NDArray[Any]) -> Floats:
    """A column of half floats, to be spread over the values of its block: [n, 1]."""
    return _floats(field)[:, None]


def _groups(scales: NDArray[Any], codes: NDArray[Any]) -> tuple[Floats, Floats]:
    """Scales [n, g, 1] and codes [n, g, values of a group], as floats."""
    n, g = scales.shape
    return _floats(scales)[..., None], _floats(codes).reshape(n, g, -1)


def _signs(codes: NDArray[Any]) -> Floats:
    """-1 where a bit is set: [..., 8] for bytes [...]."""
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")
    return np.array([1, -1], np.float32)[bits]


# ── Blocks of 32 ────────────────────────────────────────────────────────────────────────────


def _f32(b: Blocks) -> Floats:
    return b["q"][:, None]


def _f16(b: Blocks) -> Floats:
    return _scale(b["q"])


def _bf16(b: Blocks) -> Floats:
    return (b["q"].astype(np.uint32) << np.uint32(16)).view(np.float32)[:, None]


def _q4_0(b: Blocks) -> Floats:
    return _scale(b["d"]) * _floats(_bits(b["q"], 4, 16), 8)


def _q4_1(b: Blocks) -> Floats:
    out = _floats(_bits(b["q"], 4, 16))
    out *= _scale(b["d"])
    out += _scale(b["m"])
    return out


def _five(b: Blocks) -> Bytes:
    return _bits(b["q"], 4, 16) | _bits(b["high"], 1, 1) << np.uint8(4)


def _q5_0(b: Blocks) -> Floats:
    return _scale(b["d"]) * _floats(_five(b), 16)


def _q5_1(b: Blocks) -> Floats:
    return _scale(b["d"]) * _floats(_five(b)) + _scale(b["m"])


def _q8_0(b: Blocks) -> Floats:
    return _scale(b["d"]) * _floats(b["q"])


def _iq4_nl(b: Blocks) -> Floats:
    return _scale(b["d"]) * CURVE[_bits(b["q"], 4, 16)]


def _mxfp4(b: Blocks) -> Floats:
    return E8M0[b["d"]][:, None] * E2M1[_bits(b["q"], 4, 16)]


def _nvfp4(b: Blocks) -> Floats:
    scales, codes = _groups(E4M3[b["d"]], E2M1[_bits(b["q"], 4, 8)])
    return (scales * codes).reshape(len(b), -1)


# ── Blocks of 256 with scales of their own inside ───────────────────────────────────────────


def _q2_k(b: Blocks) -> Floats:
    scales, codes = _groups(_scale(b["d"]) * (b["s"] & np.uint8(15)), _bits(b["q"], 2, 32))
    low = _scale(b["m"]) * (b["s"] >> np.uint8(4))
    return (scales * codes - _floats(low)[..., None]).reshape(len(b), -1)


def _q3_k(b: Blocks) -> Floats:
    low = _bits(b["s"][:, :8], 4, 8)
    high = _bits(b["s"][:, 8:], 2, 4)
    six = _floats(low | high << np.uint8(4), 32)
    codes = _floats(_bits(b["q"], 2, 32) | _bits(b["high"], 1, 32) << np.uint8(2), 4)
    scales, codes = _groups(_scale(b["d"]) * six, codes)
    return (scales * codes).reshape(len(b), -1)


def _q45_k(b: Blocks, codes: Bytes) -> Floats:
    """Eight scales and eight lows of six bits: the first four of each lie whole in eight bytes, whose top
    bits, with the nibbles of the last four bytes, make the other four."""
    first, second, rest = b["s"][:, :4], b["s"][:, 4:8], b["s"][:, 8:]
    six, top = np.uint8(0x3F), np.uint8(0x30)
    scales = np.hstack([first & six, (rest & np.uint8(15)) | (first >> np.uint8(2)) & top])
    lows = np.hstack([second & six, (rest >> np.uint8(4)) | (second >> np.uint8(2)) & top])
    out, values = _groups(_scale(b["d"]) * scales, codes)
    return (out * values - _floats(_scale(b["m"]) * lows)[..., None]).reshape(len(b), -1)


def _q4_k(b: Blocks) -> Floats:
    return _q45_k(b, _bits(b["q"], 4, 32))


def _q5_k(b: Blocks) -> Floats:
    return _q45_k(b, _bits(b["q"], 4, 32) | _bits(b["high"], 1, 32) << np.uint8(4))


def _q6_k(b: Blocks) -> Floats:
    codes = _bits(b["q"], 4, 64) | _bits(b["high"], 2, 32) << np.uint8(4)
    scales, values = _groups(_scale(b["d"]) * b["s"], _floats(codes, 32))
    return (scales * values).reshape(len(b), -1)


def _iq4_xs(b: Blocks) -> Floats:
    low = _bits(b["s"], 4, 1)
    high = (b["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    six = _floats(low | high << np.uint16(4), 32)
    scales, codes = _groups(_scale(b["d"]) * six, CURVE[_bits(b["q"], 4, 16)])
    return (scales * codes).reshape(len(b), -1)


def _trits(field: NDArray[Any], count: int) -> Bytes:
    """Digits of a fraction in base three, first digit first: a byte holds `count` of them."""
    powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
    shifted = (field[:, None, :] * powers).astype(np.uint16)  # wraps: the digits before go
    return ((shifted * np.uint16(3)) >> np.uint16(8)).astype(np.uint8).reshape(len(field), -1)


def _tq1_0(b: Blocks) -> Floats:
    codes = np.hstack([_trits(b["q"], 5), _trits(b["q2"], 5), _trits(b["q3"], 4)])
    return _scale(b["d"]) * _floats(codes, 1)


def _tq2_0(b: Blocks) -> Floats:
    return _scale(b["d"]) * _floats(_bits(b["q"], 2, 32), 1)


# ── Blocks of 256 whose codes are points of a grid ──────────────────────────────────────────


def _on_grid(scales: NDArray[Any], points: Floats) -> Floats:
    """Points [n, any, 8 or 4] times the scale of the group they are in [n, g]."""
    scales, points = _groups(scales, points)
    return (scales * points).reshape(len(scales), -1)


def _packed_signs(rest: NDArray[np.uint32]) -> Floats:
    """Four times seven bits of signs in each word of 32 bits."""
    seven = (rest[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)) & np.uint32(127)
    return _signs(EVEN_SIGNS[seven])


def _iq2_xxs(b: Blocks) -> Floats:
    rest = b["q"]["rest"]
    scales = _scale(b["d"]) * (np.float32(0.5) + _floats(rest >> np.uint32(28))) * np.float32(0.25)
    return _on_grid(scales, grid(IQ2_XXS)[b["q"]["at"]] * _packed_signs(rest))


def _iq2_xs(b: Blocks) -> Floats:
    scales = _scale(b["d"]) * (np.float32(0.5) + _floats(_bits(b["s"], 4, 1))) * np.float32(0.25)
    signs = _signs(EVEN_SIGNS[b["q"] >> np.uint16(9)])
    return _on_grid(scales, grid(IQ2_XS)[b["q"] & np.uint16(511)] * signs)


def _iq2_s(b: Blocks) -> Floats:
    scales = _scale(b["d"]) * (np.float32(0.5) + _floats(_bits(b["s"], 4, 1))) * np.float32(0.25)
    at = b["q"] | _bits(b["high"], 2, 1).astype(np.uint16) << np.uint16(8)
    return _on_grid(scales, grid(IQ2_S)[at] * _signs(b["sign"]))


def _iq3_xxs(b: Blocks) -> Floats:
    rest = b["rest"]
    scales = _scale(b["d"]) * (np.float32(0.5) + _floats(rest >> np.uint32(28))) * np.float32(0.5)
    return _on_grid(scales, grid(IQ3_XXS)[b["q"]].reshape(len(b), 8, 4, 8) * _packed_signs(rest))


def _iq3_s(b: Blocks) -> Floats:
    scales = _scale(b["d"]) * (np.uint8(1) + np.uint8(2) * _bits(b["s"], 4, 1))
    at = b["q"] | _bits(b["high"], 1, 1).astype(np.uint16) << np.uint16(8)
    return _on_grid(scales, grid(IQ3_S)[at].reshape(len(b), 32, 8) * _signs(b["sign"]))


def _iq1_s(b: Blocks) -> Floats:
    high = b["high"][..., None]
    scales = _scale(b["d"]) * (np.uint16(2) * ((b["high"] >> np.uint16(12)) & np.uint16(7)) + np.uint16(1))
    three = (high >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    at = b["q"] | (three << np.uint16(8)).reshape(len(b), -1)
    shift = np.where(high & np.uint16(0x8000), np.float32(-0.125), np.float32(0.125))
    return _on_grid(scales, grid(IQ1)[at].reshape(len(b), 8, 32) + shift)


def _iq1_m(b: Blocks) -> Floats:
    # The top four bits of the four words of scales are a half float.
    whole = ((b["s"] >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)).sum(-1, dtype=np.uint16)
    three = (b["s"][..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    scales = _scale(whole.view(np.float16)) * (np.uint16(2) * three + np.uint16(1)).reshape(len(b), -1)
    high = _bits(b["high"], 4, 1)
    at = b["q"] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    shift = np.where(high & np.uint8(8), np.float32(-0.125), np.float32(0.125))
    return _on_grid(scales, grid(IQ1)[at] + shift[..., None])


FORMULAS: dict[str, Callable[[Blocks], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
