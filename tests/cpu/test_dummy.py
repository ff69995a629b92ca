"""Random weights: a configuration is all that is needed, and token ids go in and out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trine import LLM, Sampling
from trine.bench import offline
from trine.bench.workload import Work, fixed
from trine.engine.start import start
from trine.errors import CheckpointError, TrineError
from trine.flags import make
from trine.loader.checkpoint import open as open_checkpoint
from trine.loader.weights import Random, shapes
from trine.registry import family

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
GREEDY = Sampling(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_of_a_configuration_alone(folder: Path) -> None:
    assert open_checkpoint(folder, dummy=True).names() == {}
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        open_checkpoint(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_the_checkpoint_that_is_not_there(tied: bool) -> None:
    made = family("llama")
    found = shapes(made.Model, made.Config.from_dict(CONFIG | {"tie_word_embeddings": tied}))
    assert found["model.embed_tokens.weight"] == (300, 32)
    assert found["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert ("lm_head.weight" in found) == (not tied)
    assert len(found) == 2 * 9 + 2 + (not tied)


def test_a_seed_says_every_number() -> None:
    first, second, other = (Random({"a": (9, 5), "b": (9, 5)}, seed) for seed in (1, 1, 2))
    assert torch.equal(first.get("a"), second.get("a"))
    assert not torch.equal(first.get("a"), other.get("a"))
    assert not torch.equal(first.get("a"), first.get("b"))


def test_token_ids_without_a_tokenizer(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", threads=1)
    answers = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [len(answer.tokens) for answer in answers] == [6, 6] and answers[0].text == ""
    assert llm.generate([5, 6, 7], GREEDY)[0].tokens == answers[0].tokens
    for ask in (
        lambda: llm.generate("hello"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.generate([5], GREEDY, stop=["x"]),
        lambda: llm.detokenize([5]),
    ):
        with pytest.raises(TrineError, match="tokenizer"):
            ask()
    assert len(llm.generate([5], GREEDY)[0].tokens) == 6  # it goes on after that
    llm.close()


def test_bench_offline_on_a_real_engine(folder: Path) -> None:
    works = {
        "all": Work("", "all", lambda _: fixed(5, 30, 10, 1), 1.0),
        "steps": Work("", "steps", lambda rows: fixed(rows, 20, 12, rows), rows=(1, 4)),
    }
    config = make({"model": str(folder), "load_format": "dummy", "threads": 1})
    result = offline.run(config, folder, works, start, warm=lambda: [fixed(2, 9, 3, 1)])
    assert result["results"][0]["tokens_out"] == 50
    assert [found["rows"] for found in result["results"][1:]] == [1, 4]
    assert result["plan"]["platform"] == "cpu" and json.dumps(result)
