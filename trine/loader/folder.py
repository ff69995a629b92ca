"""A HuggingFace model folder as a checkpoint: config.json and safetensors files, one or many.

It opens only the names it lists, runs nothing of the folder, and does not know any family.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from . import sense, shard
from .files import PICKLES, read_json, refuse_code

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
INDEX_BYTES = 32 * 2**20
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors", re.ASCII)
# Read by others or by nobody, but none of them may name code.
SIDE_FILES = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def open(path: Path, *, dummy: bool = False) -> Folder:
    """The checkpoint in the folder at `path`; `dummy`: without its tensors, which need not be there."""
    return Folder(path, dummy=dummy)


class Folder:
    """A Checkpoint (see `checkpoint.py`) whose tensors are given as they are stored."""

    kind = "safetensors"

    def __init__(self, path: Path, *, dummy: bool = False) -> None:
        self.path = path
        config = path / "config.json"
        if not config.exists():
            raise CheckpointError(f"{path}: has no config.json; {_found(path)}")
        self.config = read_json(config)
        generation = path / "generation_config.json"
        self.generation = read_json(generation) if generation.exists() else {}
        refuse_code(self.config, config)
        refuse_code(self.generation, generation)
        for name in SIDE_FILES:
            if (side := path / name).exists():
                refuse_code(read_json(side), side)
        if not isinstance(self.config.get("model_type"), str):
            raise CheckpointError(f"{config}: has no model_type, so its family is not known")
        sense.check(self.config, config, dummy=dummy)
        self.tensors = {} if dummy else self._tensors()
        self.bytes = sum(entry.end - entry.begin for _, entry in self.tensors.values())

    def names(self) -> dict[str, tuple[int, ...]]:
        """Names of the tensors, and their shapes."""
        return {name: entry.shape for name, (_, entry) in self.tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        """The tensor `name`, in the type it is stored in."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        return shard.get(self.tensors[name][0], name)

    def _tensors(self) -> dict[str, tuple[Path, shard.Entry]]:
        index = self.path / INDEX
        if index.exists():
            return self._indexed(index)
        files = sorted(file for file in self.path.glob("*.safetensors") if SHARD_NAME.fullmatch(file.name))
        if (single := self.path / "model.safetensors") in files:
            files = [single]
        if not files:
            hint = "; to try its speed with random weights: --load-format dummy"
            raise CheckpointError(f"{self.path}: has no weights in safetensors; {_found(self.path)}{hint}")
        out: dict[str, tuple[Path, shard.Entry]] = {}
        for file in files:
            for name, entry in shard.read(file).items():
                if name in out:
                    raise CheckpointError(f"{file}: tensor {name[:200]!r} is in {out[name][0].name} too")
                out[name] = (file, entry)
        return out

    def _indexed(self, index: Path) -> dict[str, tuple[Path, shard.Entry]]:
        places = read_json(index, INDEX_BYTES).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{index}: has no weight_map")
        files: dict[str, dict[str, shard.Entry]] = {}
        for name in places.values():
            if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
                raise CheckpointError(
                    f"{index}: names the file {str(name)[:200]!r}, which is not a name of a shard"
                )
            if name in files:
                continue
            if not (self.path / name).exists():
                raise CheckpointError(
                    f"{self.path}: {name} is missing, {INDEX} wants it; fetch the model again"
                )
            files[name] = shard.read(self.path / name)
        for tensor, name in places.items():
            if tensor not in files[name]:
                raise CheckpointError(
                    f"{self.path / name}: has no tensor {tensor[:200]!r}, {INDEX} says it has"
                )
        return {tensor: (self.path / name, files[name][tensor]) for tensor, name in places.items()}


def _found(path: Path) -> str:
    """What there is instead, and what to do about it."""
    names = sorted(entry.name for entry in path.iterdir())
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is loaded, and is never opened. "
            "Convert it to safetensors, or take the model from where it is published as such"
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"it has {', '.join(ggufs[:4])}: give the path of the file, {path / ggufs[0]}"
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return (
        f"it has {listed or 'nothing'}. Wanted: a model folder (config.json, *.safetensors) or a .gguf file"
    )
