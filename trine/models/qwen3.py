"""Qwen3: Llama with a norm on each query and key head."""

from __future__ import annotations

from typing import Any

from trine.layers.make import Maker
from trine.layers.norm import HeadNorm

from .llama import Block as LlamaBlock
from .llama import Config as LlamaConfig
from .llama import Model as LlamaModel


class Config(LlamaConfig, frozen=True, kw_only=True):
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None

    @classmethod
    def complete(cls, values: dict[str, Any]) -> dict[str, Any]:
        return super().complete({"head_dim": 128} | values)

    def window(self, layer: int) -> int:
        if not self.use_sliding_window or not self.sliding_window:
            return 0
        if self.layer_types is not None and layer < len(self.layer_types):
            return self.sliding_window if self.layer_types[layer] == "sliding_attention" else 0
        return self.sliding_window if layer >= self.max_window_layers else 0


class Block(LlamaBlock):
    def head_norm(self, c: Config, make: Maker) -> HeadNorm:
        return make.head_norm([c.num_attention_heads, c.num_key_value_heads], c.head_dim, c.rms_norm_eps)


class Model(LlamaModel):
    Config, Block = Config, Block
    names = LlamaModel.names | {"model.layers.{}.self_attn.{q,k}_norm": "blocks.{}.qk_norm.{0,1}"}
    tiny = LlamaModel.tiny | {"head_dim": 24}
