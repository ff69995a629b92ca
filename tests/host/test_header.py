"""GGUF headers: sound ones are read as they are, hostile ones are refused at once and in little memory."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import gguf_file as kit
from trine.errors import CheckpointError
from trine.loader import header
from trine.loader.header import Header, TensorInfo, read

LIES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
HUGE = 2**31 - 1  # no count, length, offset, type or dimension of the small file may be this or more
MEMORY = 32 * 2**20


@pytest.fixture
def put(tmp_path: Path):
    def write(data: bytes | kit.File) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(bytes(data))
        return path

    return write


def is_sound(found: Header, size: int) -> None:
    """What must hold of whatever is let through: each tensor in the file, apart from the others."""
    at = found.data_offset
    for info in sorted(found.tensors, key=lambda info: info.offset):
        assert info.offset >= at and info.bytes > 0
        at = info.offset + info.bytes
    assert at <= size or not found.tensors
    assert len({info.name for info in found.tensors}) == len(found.tensors)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_a_sound_file_is_read_whole(put, version: int) -> None:
    file = kit.small(version=version)
    found = read(put(file))
    assert found.version == version
    assert found.metadata == {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 1,
        "a.float": 0.5,
        "a.bool": True,
        "tokens": ["a", "bé", "", "<|end|>"],
        "types": [1, 1, -1, 3],
        "flags": [True, False, True],
        "big": 2**63,
        "empty": [],
    }
    start = found.data_offset
    assert start == file.data
    assert found.tensors == [
        TensorInfo("a.weight", "Q8_0", (2, 32), start, 68),
        TensorInfo("b.weight", "F32", (3,), start + 96, 12),
        TensorInfo("c.weight", "F16", (2, 2, 2), start + 128, 16),
        TensorInfo("d.weight", "F32", (1, 1, 1, 4), start + 160, 16),
    ]


def test_a_header_goes_through_msgpack(put) -> None:
    found = read(put(kit.small()))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Header) == found


def test_read_safely_is_read_in_a_child(put) -> None:
    path = put(kit.small())
    assert header.read_safely(path) == read(path)
    path.write_bytes(bytes(kit.small())[:-1])
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'd.weight' offset puts its end at"):
        header.read_safely(path)


def test_every_field_with_every_lie(put) -> None:
    """About 400 files: what is too large is refused by the name of its field; what is let through is sound."""
    file = kit.small()
    files = refusals = 0
    tracemalloc.start()
    try:
        for field in file.fields:
            for lie in {lie % 2 ** (8 * field.width) for lie in LIES}:
                data = file.changed(field, lie)
                path = put(data)
                files += 1
                try:
                    is_sound(read(path), len(data))
                except CheckpointError as error:
                    refusals += 1
                    assert lie < HUGE or field.name in str(error), (field, lie)
                else:
                    assert lie < HUGE, (field, lie)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert files > 400 and refusals > 300
    assert peak < MEMORY


def test_every_truncation(put) -> None:
    file = kit.small()
    data = bytes(file)
    for end in [*range(file.header + 1), *range(file.header, len(data), 64), len(data) - 1]:
        refused(put(data[:end]))


def test_every_byte_of_the_header_changed(put) -> None:
    file = kit.small()
    for at in range(file.header):
        for change in (0x01, 0xFF):
            data = bytearray(bytes(file))
            data[at] ^= change
            with suppress(CheckpointError):
                is_sound(read(put(bytes(data))), len(data))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_damage_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    raw = bytearray(bytes(kit.small()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(raw) - 1))
        raw[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    with suppress(CheckpointError):
        is_sound(read(path), len(raw))


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 5, 2**20]), st.sampled_from([0, 1, 8])),
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_tensors_let_through_fit_in_the_file(tmp_path_factory: pytest.TempPathFactory, tensors) -> None:
    made = [(f"t{i}", (32, rows), kind, 32 * at, b"") for i, (at, rows, kind) in enumerate(tensors)]
    raw = bytes(kit.File([], made)) + bytes(1000)
    path = tmp_path_factory.getbasetemp() / "places.gguf"
    path.write_bytes(raw)
    try:
        found = read(path)
    except CheckpointError:
        return
    is_sound(found, len(raw))
    assert sum(info.bytes for info in found.tensors) <= len(raw)


def test_an_array_of_2_to_the_60_numbers_in_65_bytes(put) -> None:
    file = kit.File([("an.array", kit.ARRAY, (kit.I32, []))], [])
    length = next(field for field in file.fields if field.name.endswith("'an.array' length"))
    data = file.changed(length, 2**60)[:65].ljust(65, b"\0")
    assert "metadata 'an.array' length is 1152921504606846976, the limit is" in refused(put(data))
    data = file.changed(length, header.ITEMS)[:65].ljust(65, b"\0")
    assert "'an.array' length is 2097152, but only" in refused(put(data))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([("a", (4,), 0, 0, bytes(16)), ("a", (4,), 0, 32, bytes(16))], "tensor 'a' appears twice"),
        ([("a", (16,), 0, 0, bytes(64)), ("b", (4,), 0, 32, bytes(16))], "'b' offset overlaps tensor 'a'"),
        ([("a", (4,), 0, 0, bytes(16)), ("b", (4,), 0, 0, bytes(16))], "'b' offset overlaps tensor 'a'"),
        ([("a", (4,), 0, 8, bytes(16))], "'a' offset is 8, not a multiple of the alignment 32"),
        ([("a", (2**33, 2**33), 0, 0, bytes(16))], "'a' dimensions are [8589934592, 8589934592]"),
        ([("a", (2, 2**63), 0, 0, bytes(16))], "'a' dimensions are [9223372036854775808, 2]"),
        ([("a", (65536,) * 4, 0, 0, bytes(16))], "'a' dimensions are [65536, 65536, 65536, 65536]"),
        ([("a", (0, 4), 0, 0, bytes(16))], "'a' dimensions are [4, 0]"),
        ([("a", (2**62, 0), 0, 0, bytes(16))], "'a' dimensions are [0, 4611686018427387904]"),
        ([("a", (1,) * 5, 0, 0, bytes(16))], "'a' dimension count is 5"),
        ([("a", (33,), 8, 0, bytes(68))], "'a' dimensions have rows of 33; Q8_0 has blocks of 32"),
        ([("a", (32,), 4, 0, bytes(68))], "'a' type is 4"),
        ([("a", (32,), 9, 0, bytes(68))], "'a' type is 9"),
        ([("n" * 65, (4,), 0, 0, bytes(16))], "tensor 0 name length is 65, the limit is 64"),
    ],
)
def test_tensors_that_cannot_be(put, tensors: list[kit.Tensor], reason: str) -> None:
    assert reason in refused(put(bytes(kit.File([], tensors)) + bytes(256)))


def test_a_tensor_that_ends_one_byte_after_the_file(put) -> None:
    sound = bytes(kit.small())
    read(put(sound))
    assert "'d.weight' offset puts its end at" in refused(put(sound[:-1]))


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 2**21, 2**31, 2**32 - 1])
def test_alignments_that_cannot_be(put, alignment: int) -> None:
    file = kit.File([("general.alignment", kit.U32, alignment)], [])
    assert f"general.alignment is {alignment}, it must be a power of 2" in refused(put(file))


def test_an_alignment_that_is_no_number(put) -> None:
    assert "general.alignment is 'x'" in refused(put(kit.File([("general.alignment", kit.STRING, "x")], [])))
    assert "general.alignment is True" in refused(put(kit.File([("general.alignment", kit.BOOL, 1)], [])))


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments_are_honoured(put, alignment: int) -> None:
    tensors = [("a", (4,), kit.DENSE, 0, bytes(16)), ("b", (4,), kit.DENSE, alignment * 3, bytes(16))]
    file = kit.File([("general.alignment", kit.U32, alignment)], tensors, align=alignment)
    found = read(put(file))
    assert [info.offset for info in found.tensors] == [file.data, file.data + alignment * 3]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([("k", kit.U32, 1), ("k", kit.U32, 2)], "metadata key 'k' appears twice"),
        ([("k", kit.ARRAY, (kit.ARRAY, []))], "metadata 'k' is an array of arrays"),
        ([("k", kit.ARRAY, (13, []))], "metadata 'k' item type is 13"),
        ([("k", kit.BOOL, 2)], "metadata 'k' is 2, a bool is 0 or 1"),
        ([("k", kit.ARRAY, (kit.BOOL, [0, 1, 2]))], "metadata 'k' holds a bool that is neither 0 nor 1"),
        (
            [("k", kit.ARRAY, (kit.STRING, ["a", "b" * 65537]))],
            "metadata 'k'[1] length is 65537, the limit is 65536",
        ),
        ([("k", kit.STRING, "b" * (4 * 2**20 + 1))], "metadata 'k' length is 4194305, the limit is 4194304"),
        ([("k" * 65536, kit.U32, 1)], "metadata key length is 65536, the limit is 65535"),
    ],
)
def test_metadata_that_cannot_be(put, metadata: kit.Metadata, reason: str) -> None:
    assert reason in refused(put(kit.File(metadata, [])))


def test_a_string_that_says_it_has_2_gib(put) -> None:
    file = kit.File([("tokens", kit.ARRAY, (kit.STRING, ["a", "b"]))], [])
    field = next(field for field in file.fields if field.name == "metadata 'tokens'[1] length")
    assert "metadata 'tokens'[1] length is 2147483656, the limit is" in refused(
        put(file.changed(field, 2**31 + 8))
    )


def test_text_that_is_not_utf8(put) -> None:
    for text in ("wxyz", "klmn"):
        file = kit.File([("a", kit.STRING, "wxyz"), ("b", kit.ARRAY, (kit.STRING, ["", "klmn"]))], [])
        broken = bytes(file).replace(text.encode(), b"\xff\xfe\xfd\xfc")
        assert ("'a' is not UTF-8" if text == "wxyz" else "'b'[1] is not UTF-8") in refused(put(broken))


def test_files_that_are_something_else(put, tmp_path: Path) -> None:
    assert "magic is b'GGML'" in refused(put(b"GGML" + bytes(kit.small())[4:]))
    assert "big endian" in refused(put(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64)))
    assert "version is 1; versions 2 and 3" in refused(
        put(b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(64))
    )
    assert "only files that end in" in refused(Path("/dev/zero"))
    assert "cannot be opened" in refused(tmp_path / "absent.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a plain file" in refused(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "is not a plain file" in refused(tmp_path / "folder.gguf")


def test_a_header_has_an_end(put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "HEADER_BYTES", 100)
    assert "is beyond the first 100 bytes" in refused(put(kit.small()))


def test_long_headers_are_read_in_pieces(put, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kit.small()
    whole = read(put(file))
    for piece in (1, 7, 64):
        monkeypatch.setattr(header, "CHUNK", piece)
        assert read(put(file)) == whole


class Shrinking(io.BytesIO):
    """A file that is shorter when it is read than it was when it was asked."""

    def seek(self, offset: int, whence: int = 0) -> int:
        return super().seek(offset, whence) + (1000 if whence == 2 else 0)


def test_a_file_that_becomes_shorter(put, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kit.small()
    monkeypatch.setattr(header, "open_regular", lambda path: Shrinking(bytes(file)[: file.header - 1]))
    assert "cannot be read: the file became shorter" in refused(put(file))
