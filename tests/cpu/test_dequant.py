"""Every block format against the reference reader, bit for bit, on random bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as oracle

from trine.errors import CheckpointError
from trine.loader import dequant
from trine.loader.header import BLOCKS

KINDS = {GGMLQuantizationType(kind): name for kind, (name, _, _) in BLOCKS.items()}
READABLE = [kind for kind, name in KINDS.items() if name in dequant.FORMULAS]


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    # The payload of a NaN hangs on the order of factors and means nothing.
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    sound = ~np.isnan(ours)
    assert np.array_equal(ours.view(np.uint32)[sound], theirs.view(np.uint32)[sound])


def test_no_format_of_the_reference_is_missing() -> None:
    theirs = set(oracle._type_traits) | {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
    assert {kind.name for kind in theirs} == set(dequant.FORMULAS) == set(dequant.LAYOUTS)


def test_block_sizes_are_those_of_the_format() -> None:
    from gguf import GGML_QUANT_SIZES

    for kind, name in KINDS.items():
        assert BLOCKS[kind] == (name, *GGML_QUANT_SIZES[kind])
        if name in dequant.LAYOUTS:
            assert np.dtype(dequant.LAYOUTS[name]).itemsize == BLOCKS[kind][2]


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_random_blocks_are_equal(kind: GGMLQuantizationType) -> None:
    name, values, size = BLOCKS[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (48, 17 * size), np.uint8)
    with np.errstate(all="ignore"):
        theirs = oracle.dequantize(raw, kind)
    same_bits(dequant.dequantize(raw.ravel(), name, (48, 17 * values)), theirs)


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_each_bit_of_a_block_means_the_same(kind: GGMLQuantizationType) -> None:
    """Each byte of a block in turn with one bit set, with all and with none, the others as they were."""
    name, values, size = BLOCKS[kind]
    block = np.random.default_rng(1000 + kind).integers(0, 256, size, np.uint8)
    codes = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 255], np.uint8)
    raw = np.broadcast_to(block, (size, len(codes), size)).copy()
    raw[np.arange(size), :, np.arange(size)] = codes
    raw = raw.reshape(-1, size)
    with np.errstate(all="ignore"):
        theirs = oracle.dequantize(raw, kind)
    same_bits(dequant.dequantize(raw.ravel(), name, (len(raw), values)), theirs)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_pieces_join_without_a_seam(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, values, size = next(block for block in BLOCKS.values() if block[0] == name)
    raw = np.random.default_rng(7).integers(0, 256, 23 * size, np.uint8)
    whole = dequant.dequantize(raw, name, (23, values))
    monkeypatch.setattr(dequant, "PIECE", 5 * values)
    same_bits(dequant.dequantize(raw, name, (23, values)), whole)


def test_what_holds_no_weights_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="I32"):
        dequant.dequantize(np.zeros(8, np.uint8), "I32", (2,))


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"2 blocks of Q8_0 .* \[2, 33\]"):
        dequant.dequantize(np.zeros(68, np.uint8), "Q8_0", (2, 33))
