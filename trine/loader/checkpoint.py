"""A checkpoint: a model's configuration and its tensors by name, wherever they come from.

    checkpoint = checkpoint.open(Path("model.gguf"))
    checkpoint.config["hidden_size"], checkpoint.get("model.norm.weight")

Importing this, opening, and asking for names need no torch. It does not know what a family makes of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CheckpointError

if TYPE_CHECKING:
    import torch


class Checkpoint(Protocol):
    """What every format gives. `config` and `generation` are in the words of HuggingFace's config.json and
    generation_config.json, names of tensors too; `bytes` is the size of the tensors as stored."""

    kind: str
    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    bytes: int

    def names(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, outermost dimension first."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """One tensor: as stored, or float32 where it is stored in blocks."""
        ...


def open(path: Path | str, *, dummy: bool = False) -> Checkpoint:
    """The checkpoint at `path`: a HuggingFace model folder or a .gguf file.

    `dummy`: only the configuration is wanted, so a folder may hold nothing else."""
    from . import folder, gguf

    path = Path(path)
    if path.is_dir():
        return folder.open(path, dummy=dummy)
    if path.suffix.lower() == ".gguf" and path.exists():
        return gguf.open(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder; give a model folder or a .gguf file")
    raise CheckpointError(f"{path}: is neither a folder nor a .gguf file; give one of these")


def forget() -> None:
    """Let go of what was kept of the last file, so that opening it again was fast."""
    from . import header

    header.forget()


def eos_ids(checkpoint: Checkpoint) -> list[int]:
    """The ids that end an answer: those of generation_config.json if it names any, else of config.json."""
    for source in (checkpoint.generation, checkpoint.config):
        ids = source.get("eos_token_id")
        sound = [id for id in (ids if isinstance(ids, list) else [ids]) if type(id) is int and id >= 0]
        if sound:
            return list(dict.fromkeys(sound))
    return []
