"""Model folders: what is opened, what is refused, and that a hostile header or config is an error in words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.errors import CheckpointError, Unsupported
from trine.loader import checkpoint, files, shard
from trine.loader.checkpoint import eos_ids

CONFIG = {"model_type": "llama", "hidden_size": 8, "eos_token_id": 2}
TWO = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
}


def safetensors(header: Any, size: int | None = None, length: int | None = None) -> bytes:
    """A file with this header (JSON text or what becomes it) and as many bytes of data as it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if size is None:
        size = max((e["data_offsets"][1] for k, e in header.items() if k != "__metadata__"), default=0)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors(TWO))
    return tmp_path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open(path)
    return str(caught.value)


def test_a_folder_is_opened_without_torch(folder: Path) -> None:
    """In a process of its own, where nothing else could have imported it."""
    import subprocess

    code = (
        "import sys; from trine.loader import checkpoint; from trine import catalog\n"
        f"c = checkpoint.open({str(folder)!r}); assert c.names() == {{'a': (2, 2), 'b': (3,)}}\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'safetensors', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_folder_says(folder: Path) -> None:
    found = checkpoint.open(folder)
    assert (found.kind, found.bytes, found.config) == ("safetensors", 22, CONFIG)
    assert found.generation == {} and eos_ids(found) == [2]
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7, 5]}')
    assert eos_ids(checkpoint.open(folder)) == [5, 7]
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert eos_ids(checkpoint.open(folder)) == [2]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "header length is 0"),
        (bytes(7), "header length is 0"),
        (safetensors(TWO, length=2**60), "header length is 1152921504606846976; the file has"),
        (safetensors(TWO, length=0), "header length is 0"),
        (safetensors(TWO)[:40], "header length is"),
        (safetensors(TWO)[:-1], "the tensors have 22 bytes, the file holds 21"),
        (safetensors(TWO) + b"x", "the tensors have 22 bytes, the file holds 23"),
        (safetensors(b"[1, 2]", 0), "holds a list, an object is wanted"),
        (safetensors(b"{" * 200, 0), "is not the JSON that is wanted"),
        (safetensors(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 0), "nested too deep"),
        (safetensors(b'{"a": ' + b"9" * 5000 + b"}", 0), "is not the JSON that is wanted"),
        (safetensors(b"\xff\xfe{}", 0), "is not the JSON that is wanted"),
        (safetensors(b'{"a": NaN}', 0), "NaN is not a JSON number"),
        (safetensors(json.dumps(TWO).replace('"b"', '"a"').encode(), 22), "the key 'a' appears twice"),
        (safetensors({"a": {"dtype": "F32", "shape": [4]}}, 16), "dtype, shape and data_offsets are wanted"),
        (safetensors({"a": TWO["a"] | {"more": 1}}, 16), "dtype, shape and data_offsets are wanted"),
        (safetensors({"a": 5}, 16), "dtype, shape and data_offsets are wanted"),
        (safetensors({"a": TWO["a"] | {"dtype": "F31"}}, 16), "dtype is 'F31'"),
        (safetensors({"a": TWO["a"] | {"dtype": ["F32"]}}, 16), "dtype is"),
        (safetensors({"a": TWO["a"] | {"shape": [-2, -2]}}, 16), "shape is [-2, -2]"),
        (safetensors({"a": TWO["a"] | {"shape": [2.0, 2]}}, 16), "shape is [2.0, 2]"),
        (safetensors({"a": TWO["a"] | {"shape": [True, 4]}}, 16), "shape is [True, 4]"),
        (safetensors({"a": TWO["a"] | {"shape": [1] * 9}}, 16), "not at most 8 whole numbers"),
        (safetensors({"a": TWO["a"] | {"shape": [2**33, 2**33]}}, 16), "data_offsets leave it 16"),
        (safetensors({"a": TWO["a"] | {"shape": [2**62, 0]}}, 16), "has 0 bytes, data_offsets leave it 16"),
        (
            safetensors({"a": TWO["a"] | {"shape": [3]}}, 16),
            "F32 of shape [3] has 12 bytes, data_offsets leave it 16",
        ),
        (safetensors({"a": TWO["a"] | {"data_offsets": [16, 0]}}, 16), "data_offsets leave it -16"),
        (safetensors({"a": TWO["a"] | {"data_offsets": [0, 16, 16]}}, 16), "not two whole numbers"),
        (safetensors({"a": TWO["a"] | {"data_offsets": [0, 2**64]}}, 16), "not two whole numbers"),
        (safetensors({"a": TWO["a"] | {"data_offsets": [8, 24]}}, 24), "begin at 8: leaves a hole before it"),
        (safetensors({"a": TWO["a"], "c": TWO["a"]}, 16), "begin at 0: overlaps the one before"),
        (safetensors({"a": TWO["a"]}, 8), "the tensors have 16 bytes, the file holds 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_headers(folder: Path, data: bytes, reason: str) -> None:
    (folder / "model.safetensors").write_bytes(data)
    assert reason in refused(folder)


def test_a_header_with_words_of_its_maker_is_fine(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors({"__metadata__": {"format": "pt"}} | TWO))
    assert set(checkpoint.open(folder).names()) == {"a", "b"}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_damage_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    raw = bytearray(safetensors(TWO))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 23))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(raw)
    try:
        entries = shard.read(path)
    except CheckpointError:
        return
    assert sum(entry.end - entry.begin for entry in entries.values()) == 22


def sharded(folder: Path, weight_map: Any) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "one.safetensors").write_bytes(safetensors({"a": TWO["a"]}))
    (folder / "two.safetensors").write_bytes(safetensors({"b": TWO["b"] | {"data_offsets": [0, 6]}}))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_shards_by_their_index(folder: Path) -> None:
    sharded(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    found = checkpoint.open(folder)
    assert found.names() == {"a": (2, 2), "b": (3,)} and found.bytes == 22


def test_shards_without_an_index(folder: Path) -> None:
    sharded(folder, {})
    (folder / "model.safetensors.index.json").unlink()
    assert checkpoint.open(folder).names() == {"a": (2, 2), "b": (3,)}
    (folder / "three.safetensors").write_bytes(safetensors({"a": TWO["a"]}))
    assert "three.safetensors: tensor 'a' is in one.safetensors too" in refused(folder)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({}, "has no weight_map"),
        (["one.safetensors"], "has no weight_map"),
        ({"a": "three.safetensors"}, "three.safetensors is missing"),
        ({"b": "one.safetensors"}, "one.safetensors: has no tensor 'b'"),
        ({"a": "../one.safetensors"}, "names the file '../one.safetensors', which is not a name of a shard"),
        ({"a": "/etc/passwd"}, "names the file '/etc/passwd'"),
        ({"a": "one.safetensors\0"}, "which is not a name of a shard"),
        ({"a": "x" * 4096 + ".safetensors"}, "which is not a name of a shard"),
        ({"a": "pytorch_model.bin"}, "names the file 'pytorch_model.bin'"),
        ({"a": None}, "names the file 'None'"),
        ({"a": ["one.safetensors"]}, "which is not a name of a shard"),
        ({"a": {}}, "names the file '{}'"),
    ],
)
def test_an_index_that_cannot_be(folder: Path, weight_map: Any, reason: str) -> None:
    assert reason in refused(sharded(folder, weight_map))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "model.pkl", "x.ckpt"])
def test_pickles_are_named_and_never_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / name)  # who opens it to read waits for ever
    said = refused(folder)
    assert (
        f"has no weights in safetensors; {name} is a pickle" in said and "Convert it to safetensors" in said
    )


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer_config.json"),
        *("processor_config.json", "preprocessor_config.json"),
    ],
)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_configurations_that_name_code(folder: Path, name: str, depth: int) -> None:
    value: Any = {"auto_map": {"AutoModel": "marker.Model"}}
    for level in range(depth):
        value = {"text_config": [value]} if level % 2 else {"sub": value}
    (folder / name).write_text(json.dumps(CONFIG | value))
    (folder / "marker.py").write_text("raise SystemExit('the code of a model was run')")
    said = refused(folder)
    assert f"{name}: has auto_map" in said and "never runs code of a model" in said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not the JSON that is wanted"),
        ("[]", "holds a list"),
        ("{}", "has no model_type"),
        ('{"model_type": 5}', "has no model_type"),
        ('{"model_type": "a", "model_type": "b"}', "the key 'model_type' appears twice"),
        ('{"a": Infinity}', "Infinity is not a JSON number"),
        ('{"a": 1e999}', "1e999 is too large a number"),
        ('{"a": ' * 40 + "1" + "}" * 40, "nested too deep"),
        ('{"a": "' + "x" * files.JSON_BYTES + '"}', "has more than 4194304 bytes of JSON"),
    ],
)
def test_configurations_that_cannot_be(folder: Path, text: str, reason: str) -> None:
    (folder / "config.json").write_text(text)
    assert reason in refused(folder)


def test_special_files_are_not_opened(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        keep = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert f"{name}: is not a plain file" in refused(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(keep)


def test_links_are_followed_as_the_hub_makes_them(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    links = tmp_path_factory.mktemp("snapshot")
    for name in ("config.json", "model.safetensors"):
        (links / name).symlink_to(folder / name)
    assert checkpoint.open(links).names() == {"a": (2, 2), "b": (3,)}


def test_only_listed_names_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("README.md", "modeling.py", "pytorch_model.bin", "adapter.safetensors", "extra.json"):
        (folder / name).write_bytes(b"x")
    opened: list[str] = []
    really = os.open

    def watch(path: Any, *rest: Any, **more: Any) -> int:
        opened.append(Path(path).name)
        return really(path, *rest, **more)

    monkeypatch.setattr(files.os, "open", watch)
    checkpoint.open(folder)
    assert set(opened) == {"config.json", "model.safetensors"}


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    assert "it has nothing. Wanted: a model folder" in refused(tmp_path)
    (tmp_path / "q4.gguf").write_bytes(b"x")
    assert f"it has q4.gguf: give the path of the file, {tmp_path / 'q4.gguf'}" in refused(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"x")
    assert "is neither a folder nor a .gguf file" in refused(tmp_path / "notes.txt")
    assert "there is no such file or folder" in refused(tmp_path / "absent")
    assert "only files that end in" in _message(lambda: files.open_regular(tmp_path / "notes.txt"))


def _message(call: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize(
    "name,values,hint",
    [
        ("torch_dtype", [5, ["bfloat16"], {"text": "bfloat16"}, True], "bfloat16"),
        ("dtype", [16, False, []], "bfloat16"),
        ("rms_norm_eps", [0, 0.0, -1e-5, 1, 1e9, "1e-5", True, [1e-5]], "between 0 and 1"),
        ("layer_norm_epsilon", [0], "between 0 and 1"),
    ],
)
def test_a_configuration_that_makes_no_sense_names_the_field(
    folder: Path, name: str, values: list[Any], hint: str, dummy: bool
) -> None:
    for value in values:
        (folder / "config.json").write_text(json.dumps(CONFIG | {name: value}))
        with pytest.raises(CheckpointError, match=rf"config\.json: {name} is .*{hint}") as caught:
            checkpoint.open(folder, dummy=dummy)
        assert repr(value)[:20] in str(caught.value)
    for value in ("bfloat16", None) if "dtype" in name else (1e-6, 0.5, None):
        (folder / "config.json").write_text(json.dumps(CONFIG | {name: value}))
        checkpoint.open(folder, dummy=dummy)


@pytest.mark.parametrize(
    "dummy,hint", [(True, "remove quantization_config to measure"), (False, "16 or 32 bits")]
)
def test_quantized_checkpoints_are_refused_with_what_they_would_need(
    folder: Path, dummy: bool, hint: str
) -> None:
    """With random weights too, which would be plain ones: what is measured would be another model."""
    for value in (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_type": "fp8"},
        {"bits": 4},
    ):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": value}))
        with pytest.raises(Unsupported, match=hint) as caught:
            checkpoint.open(folder, dummy=dummy)
        assert ("in fp8" in str(caught.value)) == ("bits" not in value)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": "fp8"}))
    with pytest.raises(CheckpointError, match="quantization_config is 'fp8'"):
        checkpoint.open(folder, dummy=dummy)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": None}))
    checkpoint.open(folder, dummy=dummy)
