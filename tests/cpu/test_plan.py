"""The plan: every choice has a reason, what does not fit shrinks and says so, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trine.errors import ConfigError, Unsupported
from trine.flags import make
from trine.plan import Plan, resolve, size
from trine.platforms.base import Facts
from trine.platforms.cpu import Cpu


class Machine(Cpu):
    """A CPU with the memory and features that a test wants."""

    def __init__(self, gib: float = 16, *features: str) -> None:
        self.bytes, self.features = int(gib * 2**30), features

    def memory(self) -> tuple[int, int]:
        return self.bytes, self.bytes

    def facts(self) -> Facts:
        return Facts("cpu", "a test", 4, self.bytes, self.features)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=[1, 2],
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


def planned(
    folder: Path, gib: float = 16, real: bool = True, features: tuple[str, ...] = (), **options: Any
) -> tuple[Plan, dict[str, str]]:
    plan = resolve(make({"model": str(folder)} | options), folder, Machine(gib, *features), real=real)
    return plan, {choice.name: f"{choice.value}: {choice.why}" for choice in plan.choices}


def test_every_choice_has_a_value_and_a_reason(folder: Path) -> None:
    plan, choices = planned(folder)
    assert (plan.model, plan.family, plan.dtype, plan.max_model_len, plan.max_num_seqs) == (
        folder.name,
        "llama",
        "int8",
        512,
        64,
    )
    assert (plan.eos, plan.vocab, plan.batch_invariant, plan.depth) == ([1, 2], 256, True, 1)
    assert all(choice.value and choice.why for choice in plan.choices)
    assert {
        "dtype",
        "product",
        "attention",
        "memory",
        "kv",
        "context",
        "sequences",
        "budget",
        "depth",
    } <= set(choices)


def test_equal_wishes_make_equal_fingerprints_and_others_do_not(folder: Path) -> None:
    first, second, other = (planned(folder, block_size=n)[0].fingerprint() for n in (16, 16, 32))
    assert first == second != other


def test_the_product_depends_on_what_the_processor_can(folder: Path) -> None:
    assert planned(folder, features=("avx2", "avx512", "vnni"))[0].product == "int_mm"
    assert planned(folder, features=("avx2",))[0].product != "int_mm"


def test_context_and_rows_shrink_to_fit_and_say_so(folder: Path) -> None:
    plan, choices = planned(folder, num_pages=9, block_size=16)
    assert (plan.max_model_len, plan.max_num_seqs) == (128, 8)
    assert "shrunk from 512" in choices["context"] and "shrunk from 64" in choices["sequences"]
    plan, choices = planned(folder, gib=0.1, max_num_seqs=65536)
    assert plan.max_num_seqs < 65536 and "shrunk from 65,536" in choices["sequences"]


def test_what_if(folder: Path) -> None:
    small, large = (planned(folder, real=False, memory=m)[0].groups[0].pages for m in ("10MiB", "20MiB"))
    assert small < large


@pytest.mark.parametrize(
    "options,field,hint",
    [
        ({"memory": "1MiB"}, "memory", "give more"),
        ({"memory": "nonsense"}, "memory", "8GiB"),
        ({"max_model_len": 513}, "max_model_len", "512 positions"),
        ({"num_pages": 2**31}, "num_pages", "this machine has"),
    ],
)
def test_what_makes_no_sense_names_the_field_and_the_fix(
    folder: Path, options: dict[str, Any], field: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        planned(folder, **options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options,hint",
    [
        ({"attention": "triton"}, "asked for and cannot: "),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size 4"),
    ],
)
def test_what_nobody_serves_lists_who_was_asked(folder: Path, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(Unsupported, match=hint):
        resolve(make({"model": str(folder)} | options), folder)


@pytest.mark.parametrize(
    "text,count",
    [
        ("8GiB", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("2g", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("77", 77),
        (" 1 TiB ", 2**40),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert size(text, "memory") == count


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "9" * 400, "\u0661GiB", "1QiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="memory"):
        size(text, "memory")
