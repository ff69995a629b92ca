"""Checkpoints: the same tiny model as a folder, as shards and as GGUF, against transformers and its GGUF reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from trine.errors import CheckpointError
from trine.loader import checkpoint
from trine.loader.checkpoint import eos_ids

FAMILIES = ["llama", "qwen2", "qwen3"]
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
ARCH = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, LAYERS = 4, 2, 16, 64, 96, 2
SPECIAL = {"eos_token_id": 3, "bos_token_id": 1, "pad_token_id": 0}


def tiny(family: str, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(11)
    options = {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    config = getattr(transformers, f"{CLASSES[family]}Config")(**(options | SPECIAL | changes))
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # biases and norms too: a swap must show
    return model


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to q and k of llama: the halves of a head become neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    model: Any, family: str, path: Path, extra: Any = None, kind: GGMLQuantizationType | None = None
) -> Path:
    """The model as the converter writes it, with the reference's writer and names."""
    writer = GGUFWriter(path, family)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    for name in ("eos", "bos", "pad"):
        getattr(writer, f"add_{name}_token_id")(SPECIAL[f"{name}_token_id"])
    if family == "qwen3":
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
    if extra:
        extra(writer)
    names = gguf.get_tensor_name_map(ARCH[family], LAYERS)
    tied = model.config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = permute(value, HEADS if ".q_proj." in name else KV_HEADS)
        data = value.float().numpy()
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if kind is not None and data.ndim == 2:
            writer.add_tensor(new, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(found: checkpoint.Checkpoint, model: torch.nn.Module, tied: bool) -> None:
    wanted = {
        name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    assert found.names() == {name: tuple(value.shape) for name, value in wanted.items()}
    assert all(torch.equal(found.get(name), value) for name, value in wanted.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_folder_gives_what_was_saved(tmp_path: Path, family: str, shards: bool, tied: bool) -> None:
    model = tiny(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="40KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    found = checkpoint.open(tmp_path)
    assert found.kind == "safetensors"
    assert found.config["model_type"] == family and found.config["hidden_size"] == HIDDEN
    assert eos_ids(found) == [3]
    same(found, model, tied)
    assert found.bytes == sum(4 * found.get(name).numel() for name in found.names())


def test_tensors_keep_the_type_they_are_stored_in(tmp_path: Path) -> None:
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert checkpoint.open(tmp_path).get("model.norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_gguf_gives_what_was_converted(tmp_path: Path, family: str, tied: bool) -> None:
    model = tiny(family, tie_word_embeddings=tied)
    found = checkpoint.open(write_gguf(model, family, tmp_path / "m.gguf"))
    same(found, model, tied)
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    for name in found.names():
        assert np.array_equal(found.get(name), theirs[name]), name
    assert all(found.get(name).dtype == torch.float32 for name in found.names())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_has_the_configuration_of_its_folder(tmp_path: Path, family: str) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    folder = checkpoint.open(tmp_path).config
    found = checkpoint.open(write_gguf(model, family, tmp_path / "m.gguf")).config
    for key in (
        *(
            "architectures",
            "model_type",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "hidden_act",
        ),
        *(
            "num_attention_heads",
            "num_key_value_heads",
            "rms_norm_eps",
            "max_position_embeddings",
            "vocab_size",
        ),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    ):
        assert found[key] == folder[key], key
    assert found["head_dim"] == HEAD_DIM
    assert found["rope_theta"] == 10000.0 and found["rope_scaling"] is None


def test_biases_of_llama_are_permuted_back_too(tmp_path: Path) -> None:
    model = tiny("llama", attention_bias=True)
    found = checkpoint.open(write_gguf(model, "llama", tmp_path / "m.gguf"))
    assert found.config["attention_bias"] and not found.config["mlp_bias"]
    same(found, model, tied=False)


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16]
)
def test_rows_of_blocks_are_permuted_back(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    model = tiny("llama")
    path = write_gguf(model, "llama", tmp_path / "m.gguf", kind=kind)
    found = checkpoint.open(path)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    for name in found.names():
        assert np.array_equal(found.get(name), theirs[name]), name


def test_llama3_factors_become_its_rule(tmp_path: Path) -> None:
    """The tensor that a converter writes for Llama 3 becomes the rule that it came from."""
    rule = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny("llama", rope_parameters=rule, head_dim=HEAD_DIM, max_position_embeddings=131072)
    plain = 1.0 / 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert np.isclose(factors.max(), 32) and np.isclose(factors.min(), 1)

    def extra(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    found = checkpoint.open(write_gguf(model, "llama", tmp_path / "m.gguf", extra))
    assert found.config["rope_scaling"] == {k: v for k, v in rule.items() if k != "rope_theta"}
    assert "rope_freqs.weight" not in found.names()
    factors[2] *= 1.5
    odd = checkpoint.open(write_gguf(model, "llama", tmp_path / "odd.gguf", extra)).config["rope_scaling"]
    assert odd["rope_type"] == "longrope" and np.allclose(odd["long_factor"], factors)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_told(tmp_path: Path, kind: str) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    found = checkpoint.open(write_gguf(tiny("qwen2"), "qwen2", tmp_path / "m.gguf", extra)).config[
        "rope_scaling"
    ]
    assert found == {"rope_type": kind, "factor": 4.0} | (
        {"original_max_position_embeddings": 128} if kind == "yarn" else {}
    )


def test_ends_of_an_answer_are_found_by_id_and_by_name(tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        for name in ("tokens", "token_type"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{name}")
        writer.add_token_list(["<|im_end|>", "<|endoftext|>", *(f"t{i}" for i in range(2, VOCAB))])
        writer.add_token_types([3, 1] + [1] * (VOCAB - 2))  # the second is text, whatever it looks like

    found = checkpoint.open(write_gguf(tiny("qwen2"), "qwen2", tmp_path / "m.gguf", extra))
    assert eos_ids(found) == [3, 7, 0]


WHOLE = "it must be a number from 1 to"
REAL = "it must be a positive number"
REFUSED = [
    ("block_count", 0, WHOLE),
    ("block_count", 2**31, WHOLE),
    ("block_count", "two", WHOLE),
    ("attention.head_count", 0, WHOLE),
    ("attention.head_count", True, WHOLE),
    ("attention.head_count", [4, 4], WHOLE),
    ("attention.head_count", 3, "3 attention heads, not a multiple of 2 KV heads"),
    ("attention.head_count", 2, "rope.dimension_count"),
    ("attention.head_count_kv", 0, WHOLE),
    ("attention.head_count_kv", 3, "not a multiple of 3 KV heads"),
    ("attention.head_count_kv", 4, "has 32 rows, attention.head_count_kv makes it 64"),
    ("attention.key_length", 0, WHOLE),
    ("attention.key_length", 15, "heads of 15 values, an even number is wanted"),
    ("attention.value_length", 8, "heads of 16 values"),
    ("embedding_length", 0, WHOLE),
    ("embedding_length", 65, r"token_embd.weight is \[96, 64\], rows of embedding_length 65 wanted"),
    ("feed_forward_length", 0, WHOLE),
    ("context_length", 0, WHOLE),
    ("rope.dimension_count", 8, "only a part of each head"),
    ("rope.freq_base", 0.0, REAL),
    ("rope.freq_base", -1.0, REAL),
    ("rope.freq_base", float("nan"), REAL),
    ("rope.freq_base", float("inf"), REAL),
    ("attention.layer_norm_rms_epsilon", 0.0, REAL),
    ("attention.layer_norm_rms_epsilon", "x", REAL),
    ("attention.layer_norm_rms_epsilon", True, REAL),
    ("vocab_size", 0, WHOLE),
    ("vocab_size", 95, "says vocab_size 95, token_embd.weight has 96 rows"),
    ("expert_count", 8, "is a mixture of experts"),
    ("rope.scaling.type", "su", "scales positions with 'su'"),
    ("rope.scaling.type", "yarn", "rope.scaling.factor is None, " + REAL),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from trine.loader.header import read

    path = write_gguf(tiny("llama"), "llama", tmp_path_factory.mktemp("gguf") / "m.gguf")
    return path, read(path)


@pytest.mark.parametrize(("key", "value", "reason"), REFUSED)
def test_a_configuration_that_cannot_be_is_refused_by_name(
    sound: tuple[Path, Any], key: str, value: Any, reason: str
) -> None:
    from trine.loader.gguf import GGUF

    path, header = sound
    with pytest.raises(CheckpointError, match=reason) as caught:
        GGUF(path, type(header)(header.version, header.metadata | {f"llama.{key}": value}, header.tensors, 0))
    assert reason not in (WHOLE, REAL) or f"llama.{key} is " in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "gpt9"}, "architecture 'gpt9'; known are llama, qwen2, qwen3"),
        ({"general.architecture": 5}, "architecture '5'"),
        ({"tokenizer.ggml.eos_token_id": 96}, "eos_token_id is 96, there are 96 tokens"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id is x"),
        ({"tokenizer.ggml.tokens": ["a"] * 97}, "97 tokens, token_embd.weight has 96 rows"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    sound: tuple[Path, Any], change: dict[str, Any], reason: str
) -> None:
    from trine.loader.gguf import GGUF

    path, header = sound
    with pytest.raises(CheckpointError, match=reason):
        GGUF(path, type(header)(header.version, header.metadata | change, header.tensors, 0))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("token_embd.weight", None, "no tensor token_embd.weight"),
        ("blk.1.attn_q.weight", "blk.2.attn_q.weight", "1 tensors that llama has not: blk.2.attn_q.weight"),
        ("blk.1.attn_q.weight", "blk.01.attn_q.weight", "blk.01.attn_q.weight"),
        ("blk.1.attn_q.weight", "blk.1.attn_rot.weight", "blk.1.attn_rot.weight"),
        ("blk.1.attn_q.weight", "blk.1.ffn_up.scale", "blk.1.ffn_up.scale"),
        ("blk.1.attn_k.weight", "blk.1.attn_q.bias", "blk.1.attn_q.bias has 32 rows, attention.head_count"),
        ("output_norm.weight", "rope_freqs.weight", r"rope_freqs.weight is \[64\], wanted is \[8\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    sound: tuple[Path, Any], old: str, new: str | None, reason: str
) -> None:
    from msgspec.structs import replace

    from trine.loader.gguf import GGUF

    path, header = sound
    tensors = [
        replace(info, name=new if info.name == old else info.name)
        for info in header.tensors
        if new or info.name != old
    ]
    with pytest.raises(CheckpointError, match=reason):
        GGUF(path, type(header)(header.version, header.metadata, tensors, 0))


def test_a_gguf_that_becomes_shorter_after_its_header_was_read(tmp_path: Path) -> None:
    path = write_gguf(tiny("llama"), "llama", tmp_path / "m.gguf")
    found = checkpoint.open(path)
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(CheckpointError, match="became shorter while tensor"):
        for name in found.names():
            found.get(name)


def test_a_tensor_that_is_not_there(sound: tuple[Path, Any], tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    for path in (sound[0], tmp_path):
        with pytest.raises(CheckpointError, match=r"has no tensor model\.nose"):
            checkpoint.open(path).get("model.nose")


# config.json and generation_config.json as published with SmolLM2-135M-Instruct.
PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def test_the_default_model_is_what_was_published() -> None:
    from trine import catalog
    from trine.loader.gguf import GGUF

    path = next(model.path for model in catalog.installed() if model.name == "smollm2")
    if path is None:
        pytest.skip("smollm2 is not in the cache")
    found = checkpoint.open(path)
    assert isinstance(found, GGUF)
    assert {key: found.config[key] for key in PUBLISHED} == PUBLISHED
    assert eos_ids(found) == [2]
    assert len(found.names()) == 272 and found.bytes == 96_576_768
    info = found.stored["blk.7.attn_k.weight"]
    raw = np.fromfile(path, np.uint8, info.bytes, offset=info.offset).reshape(info.shape[0], -1)
    rows = gguf.quants.dequantize(raw, GGMLQuantizationType[info.type])
    ours = found.get("model.layers.7.self_attn.k_proj.weight")
    assert torch.equal(permute(ours, 3), torch.from_numpy(rows))
