"""What all decoder-only families share: embed, blocks, norm, head; how a configuration is read.

A family says in `names` what its tensors are called in a checkpoint. `{}` is the layer, `{a,b}` are several at
once, matched by place: "model.layers.{}.self_attn.{q,k}_proj": "blocks.{}.qkv.{0,1}".
"""

from __future__ import annotations

from typing import Any, Self

import msgspec
from msgspec import Struct
from torch import Tensor, nn

from trine.errors import CheckpointError, Unsupported
from trine.layers.make import Maker
from trine.layers.step import Step

LIMIT = 2**24  # no size in a model's configuration is larger,
LAYERS = 4096  # and no model is deeper


class KVSpec(Struct, frozen=True):
    """What one layer keeps of each position. Layers with equal ones share a pool."""

    kv_heads: int
    head_dim: int
    window: int = 0  # positions that are still looked at; 0: all


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The fields of config.json that a family reads. Unknown ones are ignored, wrong types are named."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {field.name for field in msgspec.structs.fields(cls)}
        values = cls.complete({k: v for k, v in values.items() if k in known and v is not None})
        try:
            config = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"config.json: {error}") from error
        config.check()
        return config

    @classmethod
    def complete(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill what may be left out and depends on other fields."""
        return values

    def check(self) -> None:
        """That sizes are sizes, and that nothing is asked for that is not there."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and not 0 <= value <= LIMIT:
                raise CheckpointError(f"config.json: {field.name} is {value}, must be within 0..{LIMIT}")
        if self.num_hidden_layers > LAYERS:
            raise CheckpointError(
                f"config.json: num_hidden_layers is {self.num_hidden_layers}, must be within 1..{LAYERS}"
            )
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
            self.positive(name)

    def positive(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise CheckpointError(f"config.json: {name} is {getattr(self, name)}, must be at least 1")

    def only(self, name: str, *allowed: Any) -> None:
        """A field whose other values this family cannot serve."""
        if getattr(self, name) not in allowed:
            said = ", ".join(repr(value) for value in allowed)
            raise Unsupported(f"{self.model_type}: {name} is {getattr(self, name)!r}; served: {said}")


class Decoder(nn.Module):
    """embed -> blocks -> norm -> head. A family adds `Config`, `Block`, `names`, `tiny`."""

    Config: type[ModelConfig]
    Block: Any
    names: dict[str, str]
    tiny: dict[str, Any]
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # ends of names that may stand in a checkpoint

    def __init__(self, config: Any, make: Maker) -> None:
        super().__init__()
        self.config = config
        self.embed = make.embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(self.Block(config, i, make) for i in range(config.num_hidden_layers))
        self.norm = make.norm(config.hidden_size, config.rms_norm_eps)
        self.head = make.linear(config.hidden_size, config.vocab_size, "out", wide=True)
        self.rope = make.rope(config.head_dim, *config.rope())

    def forward(self, step: Step) -> Tensor:
        """Logits [samples, vocab] in float32."""
        x, residual = None, self.embed(step.ids)
        turn = self.rope(step.positions)
        blocks: list[Any] = list(self.blocks)
        for block in blocks[:-1]:
            x, residual = block(x, residual, turn, step)
        x, residual = blocks[-1].attend(x, residual, turn, step)
        if step.wanted is not None:  # nobody looks any more at what became of the others
            if not len(step.wanted):
                return x.new_empty(0, self.config.vocab_size)  # chunks of prompts only
            x, residual = x.index_select(0, step.wanted), residual.index_select(0, step.wanted)
        x, residual = blocks[-1].after(x, residual)
        return self.head(self.norm(x, residual)[0])
