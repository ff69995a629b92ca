"""Mistral: Llama with a window on every layer, where `sliding_window` is set."""

from __future__ import annotations

from .llama import Block as LlamaBlock
from .llama import Config as LlamaConfig
from .llama import Model as LlamaModel


class Config(LlamaConfig, frozen=True, kw_only=True):
    sliding_window: int | None = None

    def window(self, layer: int) -> int:
        return self.sliding_window or 0


class Block(LlamaBlock): ...


class Model(LlamaModel):
    Config, Block = Config, Block
    tiny = LlamaModel.tiny | {"sliding_window": 40}
