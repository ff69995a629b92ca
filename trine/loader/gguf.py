"""A GGUF file as a checkpoint: its metadata becomes a configuration in HuggingFace's words, its tensors get
HuggingFace's names, and rows that the format permutes are put back.

It does not know how a header is parsed (`header.py`) nor what a block holds (`dequant.py`).

Names of keys and tensors: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the converter of
https://github.com/ggml-org/llama.cpp (MIT).
"""

from __future__ import annotations

import math
import struct
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from . import header as headers
from .files import open_regular
from .header import Header, TensorInfo

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PERMUTED = {"llama"}  # their q and k rows are stored in pairs: (i, i + half) of a head side by side

# Control tokens that end an answer in a family, beside the one the file names.
ENDS = {
    "llama": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "qwen2": ("<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
}
CONTROL = 3  # the token type of control tokens

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the configuration


def open(path: Path) -> GGUF:
    """The checkpoint in the file at `path`."""
    return GGUF(path, headers.read_safely(path))


class GGUF:
    """A Checkpoint (see `checkpoint.py`) whose tensors are dequantized to float32 as they are asked for."""

    kind = "gguf"

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.metadata = header.metadata
        self.stored = {info.name: info for info in header.tensors}
        self.family = str(header.metadata.get("general.architecture"))[:64]
        if self.family not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise self._bad(f"holds a model of the architecture {self.family!r}; known are {known}")
        self.renamed = self._renamed()
        self.config = self._config()
        self.generation = self._generation()
        self.bytes = sum(info.bytes for info in header.tensors)

    def names(self) -> dict[str, tuple[int, ...]]:
        """HuggingFace names of the tensors, and their shapes."""
        return {name: info.shape for name, info in self.renamed.items()}

    def get(self, name: str) -> torch.Tensor:
        """The tensor of a HuggingFace name, float32."""
        if (info := self.renamed.get(name)) is None:
            raise self._bad(f"has no tensor {name}")
        torch = import_module("torch")  # faces open checkpoints too, and have none
        return torch.from_numpy(self._read(info, self._heads(name)))

    def stored_rows(self, name: str) -> tuple[str, Any] | None:
        """The type of a matrix's blocks, and its rows as they are stored [rows, bytes]; None if it is no matrix."""
        if (info := self.renamed.get(name)) is None:
            raise self._bad(f"has no tensor {name}")
        if len(info.shape) != 2:
            return None
        return info.type, self._raw(info, self._heads(name)).reshape(info.shape[0], -1)

    def _read(self, info: TensorInfo, heads: int | None) -> Any:
        from .dequant import dequantize

        return dequantize(self._raw(info, heads), info.type, info.shape)

    def _raw(self, info: TensorInfo, heads: int | None) -> Any:
        """Its bytes, rows put back where the format permutes them."""
        import numpy as np

        with open_regular(self.path) as file:
            raw = np.fromfile(file, np.uint8, info.bytes, offset=info.offset)
        if raw.size != info.bytes:
            raise self._bad(f"became shorter while tensor {info.name} was read")
        if heads:  # whole rows, so their bytes can be moved before they become numbers
            rows = raw.reshape(heads, info.shape[0] // heads // 2, 2, -1)
            raw = np.ascontiguousarray(rows.swapaxes(1, 2))
        return raw

    def _heads(self, name: str) -> int | None:
        """Into how many heads the rows of a permuted tensor fall."""
        if self.family in PERMUTED and ".q_proj." in name:
            return self.config["num_attention_heads"]
        if self.family in PERMUTED and ".k_proj." in name:
            return self.config["num_key_value_heads"]
        return None

    def _renamed(self) -> dict[str, TensorInfo]:
        out: dict[str, TensorInfo] = {}
        unknown: list[str] = []
        layers = {str(i) for i in range(self._integer("block_count", 2**12))}
        for name, info in self.stored.items():
            if new := _hf_name(name, layers):
                out[new] = info
            elif name != ROPE_FACTORS:
                unknown.append(name)
        if unknown:
            raise self._bad(
                f"has {len(unknown)} tensors that {self.family} has not: {', '.join(unknown[:4])}"
            )
        return out

    def _config(self) -> dict[str, Any]:
        heads = self._integer("attention.head_count", 2**12)
        hidden = self._integer("embedding_length", 2**20)
        kv_heads = self._integer("attention.head_count_kv", 2**12, heads)
        head_dim = self._integer("attention.key_length", 2**12, hidden // heads)
        vocab = self._vocab(hidden)
        config = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length", 2**24),
            "num_hidden_layers": self._integer("block_count", 2**12),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._integer("context_length", 2**28),
            "rms_norm_eps": self._positive("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._positive("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "vocab_size": vocab,
            "tie_word_embeddings": "output.weight" not in self.stored,
            "attention_bias": "blk.0.attn_q.bias" in self.stored,
            "mlp_bias": "blk.0.ffn_down.bias" in self.stored,
        } | {f"{name}_token_id": self._token(name, vocab) for name in ("bos", "eos")}
        if (pad := self._token("padding", vocab)) is not None:
            config["pad_token_id"] = pad
        if self.family.startswith("qwen"):
            config["use_sliding_window"] = False
        self._check(config)
        return config

    def _check(self, config: dict[str, Any]) -> None:
        heads, kv_heads, head_dim = (
            config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if heads % kv_heads:
            raise self._bad(f"has {heads} attention heads, not a multiple of {kv_heads} KV heads")
        if head_dim % 2 or head_dim != self._integer("attention.value_length", 2**12, head_dim):
            raise self._bad(
                f"has heads of {head_dim} values, an even number is wanted, for keys as for values"
            )
        if self._integer("rope.dimension_count", 2**12, head_dim) != head_dim:
            raise self._bad("turns only a part of each head (rope.dimension_count), which is not supported")
        if self.metadata.get(f"{self.family}.expert_count", 0):
            raise self._bad(f"is a mixture of experts; {self.family} is served without")
        for name, (count, what) in {
            "q_proj": (heads, "attention.head_count"),
            "k_proj": (kv_heads, "attention.head_count_kv"),
        }.items():
            for full, info in self.renamed.items():
                if f".{name}." in full and info.shape[0] != count * head_dim:
                    rows = count * head_dim
                    raise self._bad(f"tensor {info.name} has {info.shape[0]} rows, {what} makes it {rows}")

    def _vocab(self, hidden: int) -> int:
        if (table := self.stored.get("token_embd.weight")) is None:
            raise self._bad("has no tensor token_embd.weight")
        if len(table.shape) != 2 or table.shape[1] != hidden:
            raise self._bad(
                f"token_embd.weight is {list(table.shape)}, rows of embedding_length {hidden} wanted"
            )
        rows = table.shape[0]
        if (said := self._integer("vocab_size", 2**24, rows)) != rows:
            raise self._bad(f"says vocab_size {said}, token_embd.weight has {rows} rows")
        if (count := len(self._tokens())) > rows:
            raise self._bad(f"has {count} tokens, token_embd.weight has {rows} rows")
        return rows

    def _tokens(self) -> list[str]:
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        return tokens if isinstance(tokens, list) else []

    def _generation(self) -> dict[str, Any]:
        vocab = self.config["vocab_size"]
        ends = [self._token(name, vocab) for name in ("eos", "eot", "eom")] + self._named_ends()
        eos = list(dict.fromkeys(end for end in ends if end is not None))
        out = {"bos_token_id": self.config["bos_token_id"], "eos_token_id": eos}
        return out | {key: self.config[key] for key in ("pad_token_id",) if key in self.config}

    def _named_ends(self) -> list[int]:
        tokens, types = self._tokens(), self.metadata.get("tokenizer.ggml.token_type")
        if not isinstance(types, list) or len(types) != len(tokens):
            return []
        wanted = ENDS[self.family]
        return [i for i, token in enumerate(tokens) if types[i] == CONTROL and token in wanted]

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if (info := self.stored.get(ROPE_FACTORS)) is not None:
            if info.shape != (head_dim // 2,):
                raise self._bad(f"{ROPE_FACTORS} is {list(info.shape)}, wanted is [{head_dim // 2}]")
            return self._rope_factors([float(x) for x in self._read(info, None)], head_dim)
        kind = self.metadata.get(f"{self.family}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise self._bad(f"scales positions with {str(kind)[:40]!r}; linear and yarn are known")
        out: dict[str, Any] = {"rope_type": kind, "factor": self._positive("rope.scaling.factor")}
        if kind == "yarn":
            length = self._integer("rope.scaling.original_context_length", 2**28)
            out["original_max_position_embeddings"] = length
        return out

    def _rope_factors(self, factors: list[float], head_dim: int) -> dict[str, Any]:
        """Factors of each frequency: of Llama 3's rule if they fit it, else as they are."""
        if not all(math.isfinite(f) and f > 0 for f in factors):
            raise self._bad(f"{ROPE_FACTORS} holds a value that is not a positive number")
        theta = self._positive("rope.freq_base", 10000.0)
        rule = {
            "rope_type": "llama3",
            "factor": float(f"{max(factors):.6g}"),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if all(
            math.isclose(a, b, rel_tol=1e-4)
            for a, b in zip(factors, _llama3_factors(rule, theta, head_dim), strict=True)
        ):
            return rule
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": self._integer("context_length", 2**28),
        }

    def _integer(self, key: str, most: int, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.family}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._bad(f"{self.family}.{key} is {str(value)[:40]}, it must be a number from 1 to {most}")
        return value

    def _positive(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.family}.{key}", default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise self._bad(f"{self.family}.{key} is {str(value)[:40]}, it must be a positive number")
        return _shortest(value)

    def _token(self, name: str, vocab: int) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < vocab):
            raise self._bad(f"tokenizer.ggml.{name}_token_id is {str(value)[:40]}, there are {vocab} tokens")
        return value

    def _bad(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")


def _hf_name(name: str, layers: set[str]) -> str | None:
    if name in OUTER:
        return OUTER[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[1] not in layers:
        return None
    if parts[2] not in INNER or parts[3] not in ("weight", "bias"):
        return None
    return f"model.layers.{parts[1]}.{INNER[parts[2]]}.{parts[3]}"


def _shortest(value: float) -> float:
    """The shortest decimal number that is the same float32: 1e-05, not 9.999999747378752e-06."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    for digits in range(1, 10):
        short = float(f"{single:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == single:
            return short
    return single


def _llama3_factors(rule: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """What Llama 3's rule divides each frequency by: nothing below a wavelength, `factor` above another."""
    length, low, high = (
        rule[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    out: list[float] = []
    for i in range(head_dim // 2):
        turns = length / (2 * math.pi * theta ** (2 * i / head_dim))  # in the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(1 / ((1 - smooth) / rule["factor"] + smooth))
    return out
