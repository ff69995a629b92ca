"""What can be refused before an engine is started: at once, and without torch.

Whatever passes here is still checked, by the plan: this only spares a person the seconds of a start that
must fail. It does not know the machine.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from .amount import human, size
from .chip import CHIPS
from .config import Config
from .errors import ConfigError, TrineError, Unsupported
from .loader import checkpoint
from .registry import names
from .text.tokenizer import Tokenizer

LEAST = {
    "auto": 0.625,
    "blocks": 0.625,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}  # bytes of a weight


def refuse(config: Config, path: Path) -> None:
    """Raise what a server of this Config for the model at `path` would raise, as far as it can be seen."""
    if config.tensor_parallel_size != 1:
        raise Unsupported(
            f"tensor_parallel_size {config.tensor_parallel_size}: an engine is one device; give 1, or leave it out"
        )
    if config.platform in CHIPS:
        raise ConfigError(
            f"platform: {config.platform} is for `trine plan`, which pretends; to run on one that is here: "
            f"--platform {CHIPS[config.platform].platform}",
            "platform",
        )
    found = checkpoint.open(path, dummy=config.load_format == "dummy")
    family = found.config.get("model_type")
    known = [name for name in names("models") if name != "decoder"]
    if family not in known:
        raise Unsupported(f"no model family is called {family!r}; there are: {', '.join(known)}")
    _refuse_length(config, found.config.get("max_position_embeddings"))
    _refuse_memory(config, found)
    _refuse_silence(config, path)


def _refuse_silence(config: Config, path: Path) -> None:
    """A server's clients send text; random weights need no tokenizer, but a server does."""
    if config.load_format == "dummy":
        try:
            Tokenizer.open(path)
        except TrineError as error:
            raise Unsupported(
                f"{error}; a server needs one: give token ids to LLM.generate, or measure with `trine bench offline`"
            ) from None


def _refuse_length(config: Config, most: object) -> None:
    asked = config.max_model_len
    if asked is not None and isinstance(most, int) and asked > most:
        raise ConfigError(
            f"max_model_len: {asked} is more than the {most} positions the model was made for",
            "max_model_len",
        )


def _refuse_memory(config: Config, found: checkpoint.Checkpoint) -> None:
    if config.memory is None:
        return
    given = size(config.memory, "memory")
    weights = int(LEAST[config.dtype] * sum(map(prod, found.names().values())))
    if given < weights:
        raise ConfigError(
            f"memory: {human(given)} cannot hold the weights, which are {human(weights)} at least; give more, or a smaller model",
            "memory",
        )
