"""Config, flags, the YAML file and the options page are one thing; peers' names are understood."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from trine.errors import ConfigError, TrineError
from trine.flags import PEERS, add_flags, fields, make, read
from trine.refuse import refuse

ROOT = Path(__file__).resolve().parents[2]


def parsed(*words: str):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return read(parser.parse_args(list(words)))


@pytest.mark.parametrize(
    "words,name,value",
    [
        (["--model", "a/b"], "model", "a/b"),
        (["--model-path", "a/b"], "model", "a/b"),
        (["a/b"], "model", "a/b"),
        (["--served-model-name", "x"], "served_model_name", "x"),
        (["--max-num-seqs", "7"], "max_num_seqs", 7),
        (["--max-running-requests", "7"], "max_num_seqs", 7),
        (["--max-model-len", "99"], "max_model_len", 99),
        (["--context-length", "99"], "max_model_len", 99),
        (["--block-size", "32"], "block_size", 32),
        (["--page-size", "32"], "block_size", 32),
        (["--gpu-memory-utilization", "0.8"], "gpu_memory_utilization", 0.8),
        (["--mem-fraction-static", "0.8"], "gpu_memory_utilization", 0.8),
        (["--tp", "4"], "tensor_parallel_size", 4),
        (["--tp-size", "4"], "tensor_parallel_size", 4),
        (["--tensor-parallel-size", "4"], "tensor_parallel_size", 4),
        (["--chunked-prefill-size", "256"], "max_num_batched_tokens", 256),
        (["--max-num-batched-tokens", "256"], "max_num_batched_tokens", 256),
        (["--schedule-policy", "prefix"], "policy", "prefix"),
        (["--attention-backend", "reference"], "attention", "reference"),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "float"], "dtype", "float32"),
        (["--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype", "fp8"),
        (["--device", "cuda"], "platform", "cuda"),
        (["--device", "h200"], "platform", "h200"),
        (["--enforce-eager"], "enforce_eager", True),
        (["--disable-cuda-graph"], "enforce_eager", True),
        (["--no-batch-invariant"], "batch_invariant", False),
        (["--api-key", "a", "--api-key", "b"], "api_key", ("a", "b")),
    ],
)
def test_flags_that_users_of_other_engines_type(words: list[str], name: str, value: object) -> None:
    assert getattr(parsed(*words), name) == value


@pytest.mark.parametrize(
    "values,name,hint",
    [
        ({"port": 99999}, "port", "from 0 to 65535"),
        ({"port": -1}, "port", "from 0"),
        ({"block_size": 0}, "block_size", "from 1"),
        ({"max_num_seqs": 0}, "max_num_seqs", "from 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization", "from 0.05"),
        ({"max_model_len": "4"}, "max_model_len", "int"),
        ({"policy": "sjf"}, "policy", "sjf"),
        ({"policy": "prefx"}, "policy", "did you mean 'prefix'"),
        ({"platform": "tpu"}, "platform", "cuda"),
        ({"attention": "flsh"}, "attention", "reference"),
        ({"dtype": "int4"}, "dtype", "int4"),
        ({"modle": "x"}, "modle", "did you mean 'model'"),
    ],
)
def test_a_bad_value_names_the_field_and_what_is_wanted(
    values: dict[str, object], name: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(values)
    assert caught.value.field == name
    assert name in str(caught.value)
    assert hint in str(caught.value)


def test_two_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models"):
        parsed("a/b", "--model", "c/d")


def test_the_file_holds_the_same_names_and_flags_go_before_it(tmp_path: Path) -> None:
    file = tmp_path / "trine.yaml"
    file.write_text("model: a/b\nmax-num-seqs: 5\ntp: 2\nport: 1\n")
    config = parsed("--config", str(file), "--port", "2")
    assert (config.model, config.max_num_seqs, config.tensor_parallel_size, config.port) == ("a/b", 5, 2, 2)


@pytest.mark.parametrize(
    "text,hint", [("- a", "names and values"), ("a: [", "not YAML"), ("prot: 1", "did you mean 'port'")]
)
def test_a_bad_file_is_a_clear_error(tmp_path: Path, text: str, hint: str) -> None:
    file = tmp_path / "trine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=hint):
        parsed("--config", str(file))


def test_every_field_says_what_it_is_and_no_flag_means_two_things() -> None:
    names = [name for field in fields() for name in (field.flag, *field.alias)]
    assert len(names) == len(set(names))
    assert all(len(field.help) > 5 for field in fields())


def test_the_options_page_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "words,hint",
    [
        ("serve --max-num-seq 3", "did you mean --max-num-seqs?"),
        ("serve --trust-remote-code", "never run"),
        ("serve m --enable-prefix-caching", "always so"),
        ("bench offline --workload w1 --tp-sizes 2", "did you mean --tp-size?"),
        ("serve a b", "'b'"),
        ("serve --dtype int4", "invalid choice"),
        ("bench offline --workload w1 --repeat 0", "from 1"),
        ("frob", "serve"),
    ],
)
def test_a_flag_that_is_not_there_is_one_line(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from trine.cli import main

    with pytest.raises(SystemExit) as caught:
        main(words.split())
    said = capsys.readouterr().err
    assert caught.value.code == 2 and hint in said and said.count("\n") == 1


def test_hints_for_flags_of_others_are_for_flags_that_are_not_ours() -> None:
    assert not {name for field in fields() for name in (field.flag, *field.alias)} & set(PEERS)


@pytest.mark.parametrize(
    "options,hint",
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        ({"platform": "h100"}, "for `trine plan`"),
        ({"max_model_len": 4096}, "4096 is more than the 2048"),
        ({"memory": "lots"}, "8GiB"),
        ({"load_format": "auto"}, "--load-format dummy"),
        ({}, "a server needs one"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, object], hint: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2048}')
    with pytest.raises(TrineError, match=hint):
        refuse(make({"load_format": "dummy"} | options), tmp_path)


def test_memory_that_cannot_hold_the_weights_is_refused_and_an_unknown_family_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    monkeypatch.setattr("trine.loader.folder.Folder._tensors", lambda self: {})
    monkeypatch.setattr("trine.loader.folder.Folder.names", lambda self: {"a": (1000, 1000)})
    refuse(make({"memory": "1MB"}), tmp_path)
    with pytest.raises(ConfigError, match="cannot hold the weights"):
        refuse(make({"memory": "1.9MB", "dtype": "bfloat16"}), tmp_path)
    config.write_text('{"model_type": "nobody"}')
    with pytest.raises(TrineError, match=r"'nobody'.*llama"):
        refuse(make({}), tmp_path)


def test_help_of_every_command_works() -> None:
    from trine.cli import parser

    for words in (
        ["serve"],
        ["chat"],
        ["generate"],
        ["plan"],
        ["bench", "serve"],
        ["bench", "offline"],
        ["pull"],
        ["list"],
        ["rm"],
    ):
        with pytest.raises(SystemExit) as caught:
            parser().parse_args([*words, "--help"])
        assert caught.value.code == 0


def test_a_file_that_is_no_plugin_is_not_offered() -> None:
    from trine.registry import find, names

    for kind in ("kernels.attention", "kernels.gemm", "scheduler.policies", "platforms", "quant"):
        assert names(kind) == sorted(find(kind)), kind


def test_help_names_the_plugins_that_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of them, in the words of their files, and a new file without another change."""
    from trine.bench.datasets import DATASETS
    from trine.bench.workload import WORKS
    from trine.chip import CHIPS
    from trine.cli import parser
    from trine.registry import names

    for field in fields():
        if field.plugins:
            assert not [name for name in names(field.plugins) if name not in field.help], field.name
            assert not [name for name in names(field.plugins) if name in field.told.split()], field.name
    (tmp_path / "lottery.py").write_text('"""By lot.\\n\\nThe rest is not shown."""\n\nPLUGIN = object\n')
    monkeypatch.setattr("trine.scheduler.policies.__path__", [str(tmp_path)])
    assert make({"policy": "lottery"}).policy == "lottery"
    verbs = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert "lottery (by lot)" in " ".join(verbs["serve"].format_help().split())
    assert all(chip in verbs["plan"].format_help() for chip in CHIPS)
    kinds = verbs["bench"]._subparsers._group_actions[0].choices
    assert all(name in kinds["serve"].format_help() for name in DATASETS)
    assert all(name in kinds["offline"].format_help() for name in WORKS)
