"""Native steps: products against the weights they stand for, models against plain torch, and every bit in any company.

Skipped, with the reason, where the native kernels are not compiled."""

from __future__ import annotations

import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kit.paged import Kind, Paged
from trine.core.types import Share
from trine.errors import Unsupported
from trine.kernels.attention.base import Limits, Want
from trine.kernels.attention.native import Native
from trine.kernels.attention.reference import Reference
from trine.kernels.native import library
from trine.kernels.native.blocks import NAMES, Blocks, pack
from trine.kernels.native.program import Program, whole_runs
from trine.kernels.native.tape import Tape
from trine.layers.make import Maker
from trine.loader.weights import Random, fill, places
from trine.runtime.recorded import record

pytestmark = pytest.mark.skipif(library.cannot() is not None, reason=str(library.cannot()))


def blocks(weight: Tensor, name: str) -> Blocks:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    return Blocks(NAMES[name], torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[name])))


def product(weight: Any, outs: int, ins: int, rows: Tensor, threads: int = 2) -> tuple[Tensor, Tensor]:
    """(rows times the weight, the weight as it is)."""
    packed, tape = pack([(0, weight)], outs, ins), Tape([])
    ids: Any = tape.step().ids
    tape.linear(tape.embed(rows, ins, 0, ids), packed, wide=True)
    ids = torch.arange(len(rows))
    given: Any = SimpleNamespace(
        ids=ids, positions=ids, starts=ids, lengths=ids, slots=ids[:0], wanted=None, write=[], pages=[]
    )
    return Program(tape, threads, 32, (len(rows), outs))(given).clone(), packed.float()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "float32"])
@pytest.mark.parametrize("outs,ins", [(8, 32), (20, 96), (131, 160), (576, 1536)])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 150])
def test_products(name: str, outs: int, ins: int, rows: int) -> None:
    torch.manual_seed(outs + rows)
    weight, x = torch.randn(outs, ins), torch.randn(rows, ins) * torch.rand(rows, 1) * 10
    found, kept = product(weight if name == "float32" else blocks(weight, name), outs, ins, x)
    bits = 4 if name.startswith("Q4") else 8
    assert ((kept - weight).norm() / weight.norm()).item() < (0.12 if bits == 4 else 0.006)
    unit = x.view(rows, -1, 32).abs().amax(-1, keepdim=True) / 127
    seen = ((x.view(rows, -1, 32) / unit).round() * unit).view(rows, ins)
    true = seen @ kept.t()  # a number halfway between two steps may go either way
    assert ((found - true).norm(dim=1) / true.norm(dim=1)).max().item() < 1e-3


def test_blocks_are_what_the_file_says() -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    for name in NAMES:
        stored = blocks(torch.randn(24, 64), name)
        known = dequantize(stored.data.numpy(), GGMLQuantizationType[name])
        assert np.allclose(stored.float().numpy(), known, atol=2e-3)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e-42, 1e38])
def test_rows_that_are_no_numbers_spoil_only_themselves(value: float) -> None:
    x = torch.randn(6, 64)
    x[2] = value
    found, kept = product(torch.randn(16, 64), 16, 64, x)
    others = [0, 1, 3, 4, 5]
    assert torch.allclose(found[others], x[others] @ kept.t(), atol=0.2)
    assert not value or abs(value) < 1e-30 or value == 1e38 or not found[2].isfinite().any()


class Running:
    """A model, native or in plain torch, over pages of its own."""

    def __init__(
        self,
        family: str,
        native: bool,
        threads: int = 2,
        kv: torch.dtype = torch.float32,
        page: int = 16,
        **options: Any,
    ) -> None:
        module = import_module(f"trine.models.{family}")
        config = module.Model.Config.from_dict({"model_type": family} | module.Model.tiny | options)
        kinds = sorted({Kind(s.kv_heads, s.head_dim, s.window) for s in config.kv()})
        groups = [kinds.index(Kind(s.kv_heads, s.head_dim, s.window)) for s in config.kv()]
        self.store = Paged(kinds, groups, page, 400, dtype=kv)
        backend, limits = Native if native else Reference, Limits(64, 64, 2048, 2048)
        self.attention: list[Any] = []
        for i, kind in enumerate(kinds):
            want = Want(config.num_attention_heads, kind.kv_heads, kind.head_dim, page, kv_dtype=str(kv)[6:], window=kind.window)  # fmt: skip
            self.attention.append(backend(want, self.store, None, i, limits))
        names = ("blocks", "native") if native else ("float32", "reference")
        layers = [self.attention[g] for g in groups]
        made = Maker(*names, attention=layers, max_len=2048, fused="native" if native else "reference")
        self.model: Any = module.Model(config, made)
        shapes = {name: place.shape for name, place in places(self.model).items()}
        fill(self.model, Random(shapes, 5, torch.device("cpu")))
        self.run = record(self.model, self.attention, threads, 2048) if native else self.model
        draw = random.Random(1)
        self.ids = {row: [draw.randrange(config.vocab_size) for _ in range(1500)] for row in range(40)}

    def step(self, rows: list[tuple[int, int]], ids: dict[int, list[int]] | None = None) -> Tensor:
        """Logits of all tokens."""
        step = self.store.step(rows, ids or self.ids)
        if self.run is not self.model:
            step = step._replace(pages=[pages.int() for pages in step.pages])
        with torch.inference_mode():
            step = step._replace(attention=[backend.plan(step) for backend in self.attention])
            return self.run(step).clone()


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}),
    ("mistral", {"num_key_value_heads": 1}),
]


@pytest.mark.parametrize("family,options", VARIANTS)
def test_models_are_those_of_plain_torch(family: str, options: dict[str, Any]) -> None:
    true, found = (Running(family, native, **options) for native in (False, True))
    for rows in ([(0, 40), (1, 3)], [(0, 1), (1, 1), (2, 300)], [(2, 1), (0, 1), (1, 30)]):
        a, b = true.step(rows), found.step(rows)
        assert a.shape == b.shape and b.isfinite().all()
        assert ((a - b).norm() / a.norm()).item() < 0.04


@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_neighbours_chunks_or_threads(kv: torch.dtype) -> None:
    options = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    alone = Running("llama", True, kv=kv, **options)
    whole = alone.step([(0, 600)])
    one = alone.step([(0, 1)])
    for threads in (1, 3):
        beside = Running("llama", True, threads, kv, **options)
        parts = [beside.step([(0, count), (1, 30 + count)])[:count] for count in (17, 239, 44, 300)]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(beside.step([(0, 1), (1, 1), (2, 5)])[:1], one)


@pytest.mark.parametrize("page", [32, 80])
def test_no_bit_depends_on_the_size_of_a_page(page: int) -> None:
    options = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    one, other = Running("qwen2", True, **options), Running("qwen2", True, page=page, **options)
    for rows in ([(0, 300), (1, 7)], [(1, 1), (0, 90)]):
        assert torch.equal(one.step(rows), other.step(rows))


@pytest.mark.parametrize("prefix", [256, 1024, 704])
def test_shared_runs_change_no_bit(prefix: int) -> None:
    """Six rows have a beginning in common, three of them more; what is no multiple of a run is read apart."""
    flat, tree = (Running("llama", True) for _ in range(2))
    ids = {row: flat.ids[0][:prefix] + flat.ids[row][prefix:] for row in range(6)}
    ids |= {row: ids[3][: prefix + 256] + flat.ids[row][prefix + 256 :] for row in (3, 4, 5)}
    for running in (flat, tree):
        running.step([(0, prefix)], ids)
        for row in range(1, 6):
            running.store.fork(0, row)
        running.step([(3, 256)], ids)
        for row in (4, 5):
            running.store.fork(3, row)
    pages = prefix // 16
    tree.attention[0].share([Share(pages, 16, [4, 5, 6]), Share(0, pages, [1, 2, 3, 4, 5, 6])])
    for rows in ([(0, 1), (5, 1), (1, 9), (4, 40)], [(row, 1) for row in (4, 2, 0, 1, 5)], [(3, 33)]):
        assert torch.equal(flat.step(rows, ids), tree.step(rows, ids))
    tree.attention[0].share([])
    assert torch.equal(flat.step([(0, 1), (1, 1)], ids), tree.step([(0, 1), (1, 1)], ids))


def test_runs_are_whole_ones() -> None:
    assert whole_runs([Share(0, 20, [1, 2, 3])], 9, 16) == [(0, 256, [1, 2, 3])]
    nested = [Share(20, 30, [1, 2]), Share(0, 20, [1, 2, 3])]
    assert whole_runs(nested, 9, 16) == [(0, 256, [1, 2, 3]), (256, 768, [1, 2])]
    assert whole_runs([Share(0, 15, [1, 2])], 9, 16) == []
    assert whole_runs([Share(0, 16, [1]), Share(1, 16, [2, 3]), Share(0, 16, [4, 99, -1, 0])], 9, 16) == []


def test_what_cannot_be_recorded_says_so() -> None:
    tape = Tape([])
    ids: Any = tape.step().ids
    x = tape.embed(torch.randn(4, 32), 32, 0, ids)
    with pytest.raises(Unsupported, match="softmax"):
        torch.softmax(x, -1)  # pyright: ignore


def test_what_attention_cannot() -> None:
    def said(**more: Any) -> str:
        given: dict[str, Any] = {
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "page_size": 16,
            "weights": "blocks",
        }
        return str(Native.cannot(Want(**(given | more))))

    assert said() == "None"
    assert "blocks" in said(weights="int8")
    assert "pages" in said(page_size=8)
    assert "heads" in said(head_dim=12)
    assert "softcap" in said(softcap=1.0)
    assert "KV" in said(kv_dtype="float16")


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "float32", "float16", "bfloat16"])
def test_an_embedding_is_looked_up_as_the_file_has_it(name: str) -> None:
    from trine.layers.embedding import Embedding

    weight, tape = torch.randn(9, 64), Tape([])
    rows: Any = blocks(weight, name) if name in NAMES else weight.to(getattr(torch, name))
    table = Embedding(9, 64, "blocks", torch.float32)
    table.put("weight", rows)
    one = pack([(0, torch.eye(64) * 127)], 64, 64)
    ids: Any = tape.step().ids
    tape.linear(table(ids), one, wide=True)
    order = torch.tensor([8, 0, 3])
    given: Any = SimpleNamespace(
        ids=order,
        positions=order,
        starts=order,
        lengths=order,
        slots=order[:0],
        wanted=None,
        write=[],
        pages=[],
    )
    found = Program(tape, 1, 32, (3, 64))(given) / 127
    assert torch.allclose(found, rows.float()[order], atol=0.02)
