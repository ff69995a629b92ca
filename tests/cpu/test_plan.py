"""The plan: every choice has a reason, what does not fit shrinks and says so, or is refused by name."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from trine.chip import CHIPS, rates
from trine.errors import ConfigError, Unsupported
from trine.flags import make
from trine.kernels.native import library
from trine.plan import Plan, resolve, size
from trine.plan.machine import Pretended
from trine.plan.resolve import buckets
from trine.platforms.base import Facts
from trine.platforms.cpu import Cpu
from trine.registry import find


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
        "int8" if library.cannot() else "blocks",
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
    assert planned(folder, dtype="int8", features=("avx2", "avx512", "vnni"))[0].product == "int_mm"
    assert planned(folder, dtype="int8", features=("avx2",))[0].product != "int_mm"


def test_context_and_rows_shrink_to_fit_and_say_so(folder: Path) -> None:
    plan, choices = planned(folder, num_pages=9, block_size=16)
    assert (plan.max_model_len, plan.max_num_seqs) == (128, 8)
    assert "shrunk from 512" in choices["context"] and "shrunk from 64" in choices["sequences"]
    plan, choices = planned(folder, gib=0.1, max_num_seqs=65536)
    assert plan.max_num_seqs < 65536 and "shrunk from 65,536" in choices["sequences"]


def test_what_if(folder: Path) -> None:
    small, large = (planned(folder, real=False, memory=m)[0].groups[0].pages for m in ("10MiB", "20MiB"))
    assert small < large


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize(
    "options,field,hint",
    [
        ({"memory": "1MiB"}, "memory", "give more"),
        ({"memory": "nonsense"}, "memory", "8GiB"),
        ({"max_model_len": 513}, "max_model_len", "512 positions"),
        ({"num_pages": 2**31}, "num_pages", "this machine has"),
        (
            {"memory": "17GiB"},
            "memory",
            "17 GiB is more than the 16 GiB that this machine has; give less, or .*h200",
        ),
    ],
)
def test_what_makes_no_sense_names_the_field_and_the_fix(
    folder: Path, options: dict[str, Any], field: str, hint: str, real: bool
) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        planned(folder, real=real, **options)
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


LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}


class Gpu(Pretended):
    """One of which others use a part."""

    def __init__(self, chip: str = "h200", free: float = 140.0) -> None:
        super().__init__(CHIPS[chip])
        self.free = int(free * 2**30)

    def memory(self) -> tuple[int, int]:
        return self.free, self.chip.memory


def on_gpu(
    tmp_path: Path, gpu: Gpu | None = None, model: dict[str, Any] | None = None, **options: Any
) -> tuple[Plan, dict[str, str]]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | (model or {})))
    config = make({"model": str(tmp_path), "load_format": "dummy", "platform": "h200"} | options)
    plan = resolve(config, tmp_path, gpu or Gpu())
    return plan, {choice.name: f"{choice.value}: {choice.why}" for choice in plan.choices}


def test_a_gpu_computes_in_what_the_checkpoint_has_and_overlaps(tmp_path: Path) -> None:
    plan, choices = on_gpu(tmp_path)
    assert (plan.platform, plan.dtype, plan.activations, plan.kv_dtype) == ("cuda", *["bfloat16"] * 3)
    assert (plan.max_num_seqs, plan.budget, plan.depth, plan.max_model_len) == (256, 16384, 2, 131072)
    assert plan.batch_invariant is False and plan.graphs[-1] == 256
    assert 100 < plan.ridge < 300 and plan.reach == pytest.approx(3.75e-5, rel=0.05)
    assert {"product", "fused", "table", "sampling", "attention", "graphs", "ridge"} <= set(choices)
    half = on_gpu(tmp_path, model={"torch_dtype": "float16"})[0]
    assert half.dtype == "float16" == half.kv_dtype
    assert on_gpu(tmp_path, model={"torch_dtype": "float32"})[0].dtype == "bfloat16"
    assert on_gpu(tmp_path, model={"torch_dtype": None})[0].dtype == "bfloat16"


def test_what_is_asked_of_a_gpu_is_done(tmp_path: Path) -> None:
    plan, _ = on_gpu(
        tmp_path, enforce_eager=True, kv_cache_dtype="fp8", max_num_seqs=1024, depth=1, batch_invariant=True
    )
    assert (plan.graphs, plan.kv_dtype, plan.max_num_seqs, plan.depth) == ([], "float8_e4m3fn", 1024, 1)
    assert plan.batch_invariant and plan.fingerprint() != on_gpu(tmp_path)[0].fingerprint()


def test_kv_takes_what_is_left_of_what_is_free(tmp_path: Path) -> None:
    tokens = {}
    for free in (30, 70, 140):
        plan, choices = on_gpu(tmp_path, Gpu(free=free))
        tokens[free] = (plan.groups[0].pages - 1) * plan.page_size
        assert f"90% of {free} GiB free" in choices["memory"]
        used = 16.06e9 + tokens[free] * 131072
        assert used < 0.9 * free * 2**30 < used + 4 * 2**30  # 8B weights, and at most so much work space
    assert tokens[30] < tokens[70] < tokens[140]
    plan, choices = on_gpu(tmp_path, Gpu(free=24))
    assert plan.max_model_len < 131072 and "shrunk from 131,072" in choices["context"]
    eight_bits = on_gpu(tmp_path, kv_cache_dtype="fp8")[0].groups[0].pages
    assert eight_bits == pytest.approx(2 * on_gpu(tmp_path)[0].groups[0].pages, rel=0.01)
    assert on_gpu(tmp_path, memory="40GiB")[0].groups[0].pages < eight_bits
    with pytest.raises(ConfigError, match="no room for KV"):
        on_gpu(tmp_path, Gpu(free=16))
    with pytest.raises(ConfigError, match="60 GiB would be used, and the NVIDIA H200 has 30 GiB"):
        on_gpu(tmp_path, Gpu(free=30), memory="60GiB")


def test_a_step_shrinks_on_a_small_gpu(tmp_path: Path) -> None:
    small = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    plan, _ = on_gpu(tmp_path, Gpu(free=6), small)
    assert 1024 <= plan.budget < 8192
    assert on_gpu(tmp_path, Gpu(free=6), small, max_num_batched_tokens=8192)[0].budget == 8192


@pytest.mark.parametrize("chip", CHIPS)
def test_a_gpu_that_is_not_here_can_be_planned_for(tmp_path: Path, chip: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = make({"model": str(tmp_path), "load_format": "dummy", "platform": chip})
    plan = resolve(config, tmp_path, real=False)
    said = {choice.name: choice.why for choice in plan.choices}
    assert plan.platform == CHIPS[chip].platform and CHIPS[chip].name in said["platform"]
    assert plan.page_size == (64 if chip in ("h100", "h200", "b200") else 16)
    assert "pretended" in said["platform"]
    with pytest.raises(ConfigError, match="for `trine plan`"):
        resolve(config, tmp_path)


def test_int8_on_a_gpu_says_who_was_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = make({"model": str(tmp_path), "load_format": "dummy", "dtype": "int8"})
    with pytest.raises(Unsupported, match="is for a CPU, not cuda"):
        resolve(config, tmp_path, Gpu())


@pytest.mark.parametrize(
    "rows,found",
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (16, [1, 2, 4, 8, 16])],
)
def test_buckets(rows: int, found: list[int]) -> None:
    assert buckets(rows) == found


def test_buckets_grow_with_the_rows() -> None:
    for rows in range(1, 1025):
        found = buckets(rows)
        assert found[-1] == rows and found == sorted(set(found))
        assert all(b - a <= (8 if b <= 256 else 16 if b <= 512 else 32) for a, b in pairwise(found))
    assert len(buckets(256)) == 35 and {272, 512, 544, 1024} <= set(buckets(1024))


def test_rates_of_a_chip_that_is_not_in_the_table_are_those_of_its_generation() -> None:
    assert rates("cuda", "NVIDIA H200 NVL", (9, 0)).reading > 0
    assert rates("cuda", "NVIDIA A100-PCIE-40GB", (8, 0)) == CHIPS["a100"].rates
    assert rates("cuda", "NVIDIA H20", (9, 0)) in [CHIPS[name].rates for name in ("h100", "h200")]
    assert rates("cuda", "NVIDIA L4", (8, 9)).ridge > 1


def test_a_kernel_that_is_missing_here_does_not_keep_a_plan_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for backend in find("kernels.attention").values():
        monkeypatch.setattr(backend, "cannot", classmethod(lambda cls, want: "is not installed"))
    values = {"model": str(tmp_path), "load_format": "dummy"}
    plan = resolve(make(values | {"platform": "b200"}), tmp_path, real=False)
    said = {choice.name: choice for choice in plan.choices}["attention"]
    assert said.value == "none" and "is not installed" in said.why
    with pytest.raises(Unsupported, match="is not installed"):
        resolve(make(values), tmp_path, Gpu())


@pytest.mark.parametrize("eos", [[["x"]], {}, 2.0, "2", [1, True]])
def test_what_ends_a_text_must_be_ids(tmp_path: Path, eos: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"eos_token_id": eos}))
    config = make({"model": str(tmp_path), "load_format": "dummy"})
    with pytest.raises(ConfigError, match="eos_token_id"):
        resolve(config, tmp_path, Gpu())


@pytest.mark.parametrize(
    "options,hint",
    [
        ({"memory": "200GiB"}, "memory: 200 GiB is more than the 140 GiB that the NVIDIA H200 has"),
        ({"num_pages": 2**20}, "num_pages: .* would be used, and the NVIDIA H200 has 140 GiB"),
    ],
)
def test_a_gpu_that_is_not_here_has_so_much_memory_and_no_more(
    tmp_path: Path, options: dict[str, Any], hint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    values = {"model": str(tmp_path), "load_format": "dummy", "platform": "h200"}
    with pytest.raises(ConfigError, match=hint) as caught:
        resolve(make(values | options), tmp_path, real=False)
    assert caught.value.field in options
    resolve(make(values | {"memory": "139GiB"}), tmp_path, real=False)


def test_what_is_only_asked_may_want_what_others_use_now(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = make({"model": str(tmp_path), "load_format": "dummy", "memory": "60GiB"})
    resolve(config, tmp_path, Gpu(free=30), real=False)
    with pytest.raises(ConfigError, match="this machine has 30 GiB"):
        resolve(config, tmp_path, Gpu(free=30))


def test_a_context_that_nobody_named_is_not_what_the_model_was_made_for(tmp_path: Path) -> None:
    named = on_gpu(tmp_path)[1]["context"]
    assert named == "131,072: what the model was made for"
    unnamed = {"max_position_embeddings": None}
    assert on_gpu(tmp_path, model=unnamed)[1]["context"] == (
        "2,048: the default: config.json names no max_position_embeddings"
    )
    with pytest.raises(ConfigError, match="2048 positions that are taken where config") as caught:
        on_gpu(tmp_path, model=unnamed, max_model_len=4096)
    assert caught.value.field == "max_model_len" and "made for" not in str(caught.value)
    assert on_gpu(tmp_path, model=unnamed, max_model_len=1024)[1]["context"] == "1,024: --max-model-len"


@pytest.mark.skipif(library.cannot() is not None, reason=str(library.cannot()))
def test_native_kernels_serve_what_they_can_and_say_what_they_cannot(folder: Path) -> None:
    plan, choices = planned(folder)
    assert (plan.product, plan.fused, plan.attention, plan.kv_dtype) == ("native",) * 3 + ("bfloat16",)
    for options, reason in (
        ({"block_size": 8}, "pages"),
        ({"attention": "reference"}, "--attention reference"),
    ):
        plan, choices = planned(folder, **options)
        assert plan.dtype == "int8" and plan.attention == "reference"
        assert reason in choices["dtype"]
    with pytest.raises(Unsupported, match="pages"):
        planned(folder, dtype="blocks", block_size=8)
