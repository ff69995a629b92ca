"""Every model file against transformers on its `tiny` shape, and bit against bit against itself: in chunks,
from the cache, in any company. A new file in trine/models is found and tested with no test code."""

from __future__ import annotations

import random
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import trine.models
from tests.kit.paged import Kind, Paged
from trine.errors import CheckpointError, Unsupported
from trine.kernels.attention.base import Want
from trine.kernels.attention.reference import Reference
from trine.kernels.gemm import base as gemm
from trine.kernels.select import select
from trine.layers.make import Maker
from trine.loader.weights import dummy, fill, places
from trine.models.decoder import Decoder

FAMILIES = [m.name for m in iter_modules(trine.models.__path__) if m.name != "decoder"]
TURNED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
# What a family may say beside its `tiny`: each is built and compared.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 32, "num_key_value_heads": 1, "rope_parameters": TURNED}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
]


class InMemory:
    """A checkpoint of tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


class Running:
    """A model over a paged store with scattered pages."""

    def __init__(
        self, family: str, options: dict[str, Any], dtype: str = "float32", product: str = "auto"
    ) -> None:
        module = import_module(f"trine.models.{family}")
        self.family, self.values = family, {"model_type": family} | module.Model.tiny | options
        self.config = module.Model.Config.from_dict(self.values)
        specs = self.config.kv()
        kinds = sorted({Kind(s.kv_heads, s.head_dim, s.window) for s in specs})
        self.groups = [kinds.index(Kind(s.kv_heads, s.head_dim, s.window)) for s in specs]
        self.kinds = kinds
        product = select("kernels.gemm", gemm.Want(dtype), product).name
        self.backends = [Behind(), Behind()]
        make = Maker(dtype, product, attention=[self.backends[g] for g in self.groups], max_len=512)
        self.model: Decoder = module.Model(self.config, make)
        self.clear()

    def clear(self, seed: int = 0, page_size: int = 4) -> None:
        """Forget all rows."""
        self.rows = Paged(self.kinds, self.groups, page_size, pages=800, seed=seed)
        for group, kind in enumerate(self.kinds):
            want = Want(
                self.config.num_attention_heads, kind.kv_heads, kind.head_dim, page_size, window=kind.window
            )
            self.backends[group].backend = Reference(want, self.rows, None, group)

    def run(self, texts: dict[int, list[int]], counts: list[tuple[int, int]]) -> dict[int, Tensor]:
        """Logits of each row's next tokens."""
        counts = sorted(counts, key=lambda one: one[1] > 1)
        step = self.rows.step(counts, texts)
        step = step._replace(attention=[b.backend.plan(step) for b in self.backends[: len(self.kinds)]])
        with torch.inference_mode():
            logits = self.model(step)
        return {
            row: part for (row, _), part in zip(counts, logits.split([n for _, n in counts]), strict=True)
        }

    def mixed(self, texts: dict[int, list[int]], seed: int) -> dict[int, Tensor]:
        """All rows to their ends, in random company and pieces."""
        self.clear(seed, page_size=[1, 4, 16][seed % 3])
        draw, found = random.Random(seed), {row: [] for row in texts}
        left = {row: len(text) for row, text in texts.items()}
        while left:
            chosen = draw.sample(sorted(left), draw.randint(1, len(left)))
            counts = [(row, min(left[row], draw.choice([1, 1, 2, 7, 60]))) for row in chosen]
            for row, logits in self.run(texts, counts).items():
                found[row].append(logits)
                left[row] -= len(logits)
            left = {row: n for row, n in left.items() if n}
        return {row: torch.cat(parts) for row, parts in found.items()}


class Behind:
    """Stands where a backend will be: models are built before their store."""

    backend: Reference

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def oracle(running: Running, seed: int = 0) -> torch.nn.Module:
    """The same configuration in transformers, with random weights that show every swap."""
    config = transformers.AutoConfig.for_model(**running.values)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def text(length: int, seed: int, vocab: int = 160) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


@pytest.mark.parametrize(
    ("family", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "+".join(v)
)
def test_equals_transformers(family: str, options: dict[str, Any]) -> None:
    running = Running(family, options)
    theirs = oracle(running)
    fill(running.model, InMemory(dict(theirs.state_dict())))
    texts = {0: text(150, 1), 1: text(9, 2)}
    ours = running.run(texts, [(0, 150), (1, 9)])
    for row, ids in texts.items():
        with torch.inference_mode():
            wanted = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(ours[row], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_depends_on_company_or_pieces(family: str, dtype: str) -> None:
    running = Running(family, {}, dtype)
    dummy(running.model, seed=3)
    texts = {row: text(length, row) for row, length in enumerate([1, 5, 90, 290])}
    alone = {row: running.run(texts, [(row, len(ids))])[row] for row, ids in texts.items()}
    for seed in (1, 2):
        mixed = running.mixed(texts, seed)
        assert all(torch.equal(mixed[row], alone[row]) for row in texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_prefix_changes_no_bit(family: str) -> None:
    running = Running(family, {}, "int8")
    dummy(running.model, seed=4)
    shared, texts = text(32, 1), {}
    texts = {0: shared + text(20, 2), 1: shared + text(11, 3)}
    running.run(texts, [(0, 32)])
    running.rows.fork(0, 1)
    cached = running.run(texts, [(1, 11)])[1]
    running.clear()
    assert torch.equal(cached, running.run(texts, [(1, 43)])[1][32:])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_only_wanted_tokens_get_logits(dtype: str) -> None:
    running = Running("llama", {}, dtype)
    dummy(running.model, seed=4)
    every = running.run({0: text(9, 1)}, [(0, 9)])[0]
    for wanted in ([8], [], [2, 5]):
        running.clear()
        step = running.rows.step([(0, 9)], {0: text(9, 1)})
        step = step._replace(wanted=torch.tensor(wanted, dtype=torch.int64))
        step = step._replace(attention=[running.backends[0].backend.plan(step)])
        with torch.inference_mode():
            assert torch.equal(running.model(step), every[wanted])


def test_int8_products_give_the_same_logits() -> None:
    texts, found = {0: text(40, 1)}, []
    for product in ("exact", "fbgemm"):
        running = Running("llama", {}, "int8", product)
        dummy(running.model, seed=5)
        found.append(running.run(texts, [(0, 40)])[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_smaller_weights_stay_close(dtype: str) -> None:
    texts, found = {0: text(100, 1)}, {}
    for kind in ("float32", dtype):
        running = Running("llama", {"tie_word_embeddings": True}, kind)
        dummy(running.model, seed=6)
        found[kind] = running.run(texts, [(0, 100)])[0].double()
    error = (found[dtype] - found["float32"]).norm() / found["float32"].norm()
    assert 1e-6 < error < 0.03


def test_what_does_not_fit_is_named() -> None:
    running = Running("llama", {})
    tensors = {name: torch.zeros(place.shape) for name, place in places(running.model).items()}
    changed = dict(tensors)
    del changed["model.layers.1.self_attn.k_proj.weight"]
    changed["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    changed["model.norm.weight"] = torch.zeros(65)
    with pytest.raises(CheckpointError) as error:
        fill(running.model, InMemory(changed))
    for said in (
        "1 missing: model.layers.1.self_attn.k_proj.weight",
        "q_proj.bias",
        "model.norm.weight (65,)",
    ):
        assert said in str(error.value)
    fill(running.model, InMemory(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"num_attention_heads": "four"}, CheckpointError, "num_attention_heads"),
        ({"num_attention_heads": None}, CheckpointError, "num_attention_heads"),
        ({"num_attention_heads": 0}, CheckpointError, "num_attention_heads"),
        ({"num_key_value_heads": 3}, CheckpointError, "evenly"),
        ({"head_dim": 15}, CheckpointError, "even"),
        ({"hidden_size": -1}, CheckpointError, "hidden_size"),
        ({"vocab_size": 10**12}, CheckpointError, "vocab_size"),
        ({"num_hidden_layers": 100_000}, CheckpointError, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, Unsupported, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, Unsupported, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, CheckpointError, "factor"),
        ({"rope_theta": -1.0}, CheckpointError, "rope_theta"),
    ],
)
def test_a_wrong_configuration_is_named(change: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Running("llama", change)


def test_dummy_weights_are_the_seeds() -> None:
    texts, found = {0: text(5, 1)}, []
    for seed in (1, 1, 2):
        running = Running("qwen2", {})
        dummy(running.model, seed)
        found.append(running.run(texts, [(0, 5)])[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
