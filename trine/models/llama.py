"""Llama. Also the shape of Mistral, Qwen2 and many others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trine.errors import CheckpointError
from trine.layers.make import Maker
from trine.layers.norm import HeadNorm
from trine.layers.step import Step

from .decoder import Decoder, KVSpec, ModelConfig


class Config(ModelConfig, frozen=True, kw_only=True):
    """As in config.json."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # the two above, as newer checkpoints write them
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def complete(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What older configurations leave out."""
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
        if values.get("head_dim") is None and type(hidden) is int and type(heads) is int:
            values["head_dim"] = hidden // max(heads, 1)
        return values

    def check(self) -> None:
        super().check()
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
            self.positive(name)
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config.json: {self.num_attention_heads} num_attention_heads cannot share "
                f"{self.num_key_value_heads} num_key_value_heads evenly"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim is {self.head_dim}, must be even")
        self.only("hidden_act", "silu")
        self.only("partial_rotary_factor", None, 1)

    def rope(self) -> tuple[float, dict[str, Any]]:
        """Base of the angles, and how they are scaled."""
        scaling = self.rope_parameters or self.rope_scaling or {}
        theta = scaling.get("rope_theta", self.rope_theta)
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise CheckpointError(f"config.json: rope_theta must be a positive number, found {theta!r}")
        return float(theta), scaling

    def window(self, layer: int) -> int:
        """Positions that a layer looks back, its own included; 0: all."""
        return 0

    def kv(self) -> list[KVSpec]:
        """By layer."""
        layers = range(self.num_hidden_layers)
        return [KVSpec(self.num_key_value_heads, self.head_dim, self.window(layer)) for layer in layers]

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias


class Block(nn.Module):
    def __init__(self, c: Config, layer: int, make: Maker) -> None:
        super().__init__()
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        q, kv = heads * c.head_dim, kv_heads * c.head_dim
        self.norm1 = make.norm(c.hidden_size, c.rms_norm_eps)
        self.qkv = make.linear(c.hidden_size, [[q, kv, kv]], "out", bias=c.qkv_bias)
        self.qk_norm = self.head_norm(c, make)
        self.attention = make.attention(layer, heads, kv_heads, c.head_dim, self.qk_norm)
        self.out = make.linear(q, c.hidden_size, "in", bias=c.out_bias)
        self.norm2 = make.norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = make.gated_mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)

    def head_norm(self, c: Config, make: Maker) -> HeadNorm | None:
        """What relatives change."""
        return None

    def attend(self, x: Tensor | None, residual: Tensor, turn: Any, step: Step) -> tuple[Tensor, Tensor]:
        """Up to what attention gives. x: what is not yet added to the residual."""
        qkv, residual = self.qkv.normed(self.norm1, x, residual)
        return self.attention(qkv, turn, step), residual

    def after(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """Pure: everything behind attention. x, out: what is not yet added to the residual."""
        return self.mlp(self.norm2, *self.out.added(x, residual))

    def forward(
        self, x: Tensor | None, residual: Tensor, turn: Any, step: Step
    ) -> tuple[Tensor | None, Tensor]:
        return self.after(*self.attend(x, residual, turn, step))


class Model(Decoder):
    Config, Block = Config, Block
    names = {
        "model.embed_tokens": "embed",
        "model.layers.{}.input_layernorm": "blocks.{}.norm1",
        "model.layers.{}.self_attn.{q,k,v}_proj": "blocks.{}.qkv.{0,1,2}",
        "model.layers.{}.self_attn.o_proj": "blocks.{}.out",
        "model.layers.{}.post_attention_layernorm": "blocks.{}.norm2",
        "model.layers.{}.mlp.{gate,up}_proj": "blocks.{}.mlp.up.{0,1}",
        "model.layers.{}.mlp.down_proj": "blocks.{}.mlp.down",
        "model.norm": "norm",
        "lm_head": "head",
    }
    tiny = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 160,
        "max_position_embeddings": 512,
    }
