"""Qwen2: Llama with a bias on queries, keys and values, and a window in the upper layers of a few models."""

from __future__ import annotations

from .llama import Block as LlamaBlock
from .llama import Config as LlamaConfig
from .llama import Model as LlamaModel


class Config(LlamaConfig, frozen=True, kw_only=True):
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def out_bias(self) -> bool:
        return False

    def window(self, layer: int) -> int:
        if not self.use_sliding_window or not self.sliding_window:
            return 0
        if self.layer_types is not None and layer < len(self.layer_types):
            return self.sliding_window if self.layer_types[layer] == "sliding_attention" else 0
        return self.sliding_window if layer >= self.max_window_layers else 0


class Block(LlamaBlock): ...


class Model(LlamaModel):
    Config, Block = Config, Block
