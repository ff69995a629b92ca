"""Fill a model from a checkpoint through its `names`, one tensor at a time.

All that is wrong with a checkpoint is said at once, by name, before the first tensor is read. It does not
know formats (checkpoint.py) or how weights are kept (quant).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trine.errors import CheckpointError
from trine.kernels.native.blocks import NAMES, Blocks
from trine.layers.make import Maker
from trine.layers.part import Part
from trine.models.decoder import Decoder

SHOWN = 8  # names of a kind in an error


class Source(Protocol):
    """Of a checkpoint, what is needed here."""

    def names(self) -> dict[str, tuple[int, ...]]: ...
    def get(self, name: str) -> Tensor: ...


class Place(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    part: Part
    name: str  # what the part calls it
    shape: tuple[int, ...]


def fill(model: Decoder, source: Source, progress: Callable[[int, int], None] | None = None) -> None:
    """Load every tensor. `progress` is called with tensors done, and in all."""
    wanted = places(model)
    tied = model.config.tie_word_embeddings
    if tied:
        wanted = {name: place for name, place in wanted.items() if place.part is not model.head}
    _compare(model, wanted, source.names(), tied)
    left: dict[Part, int] = {}
    for place in wanted.values():
        left[place.part] = left.get(place.part, 0) + 1
    with torch.inference_mode():
        for i, (name, place) in enumerate(wanted.items()):
            with torch.device("cpu"):  # whatever a format does to its bytes, it does on the host
                tensor = _read(source, name, place.part)
            if tuple(tensor.shape) != place.shape:
                raise CheckpointError(f"{name}: shape {tuple(tensor.shape)}, wanted {place.shape}")
            place.part.put(place.name, tensor)
            left[place.part] -= 1
            if not left[place.part]:
                place.part.finish()  # at once: packed weights may replace plain ones
            if progress:
                progress(i + 1, len(wanted))
        if tied:
            model.head.tie(model.embed.weight)


def _read(source: Source, name: str, part: Part) -> Any:
    """The tensor, or its rows as the file has them if the part takes them so."""
    stored = getattr(source, "stored_rows", None) if part.takes_blocks else None
    found = stored(name) if stored else None
    if found is None or found[0] not in NAMES:
        return source.get(name)
    return Blocks(NAMES[found[0]], torch.from_numpy(found[1]))


def dummy(model: Decoder, seed: int) -> None:
    """Random weights of the right shapes, drawn where the model is: numbers differ between kinds of device."""
    shapes = {name: place.shape for name, place in places(model).items()}
    fill(model, Random(shapes, seed, model.embed.weight.device))


def shapes(family: type[Decoder], config: Any) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a model of this configuration wants, by its name. Takes no memory."""
    with torch.device("meta"):
        model = family(config, Maker("float32", "reference", max_len=1))
    tied = config.tie_word_embeddings
    return {n: place.shape for n, place in places(model).items() if not (tied and place.part is model.head)}


class Random:
    """A checkpoint of random tensors, each known by its name and the seed."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], seed: int, device: torch.device = torch.device("cpu")
    ) -> None:
        self.shapes, self.seed, self.device = shapes, seed, device
        self.order = {name: i for i, name in enumerate(shapes)}
        # On a GPU half as wide: a vocabulary's float32 copy would need room beside all else.
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def names(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def get(self, name: str) -> Tensor:
        shape = self.shapes[name]
        kind: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape, **kind)  # a norm's
        draw = torch.Generator(self.device).manual_seed((self.seed * 1_000_003 + self.order[name]) % 2**63)
        return torch.randn(shape, generator=draw, **kind).mul_(shape[-1] ** -0.5)


def places(model: Decoder) -> dict[str, Place]:
    """Of every tensor that the model wants, by its name in a checkpoint."""
    found = {}
    for pattern, target in model.names.items():
        for theirs, ours in expand(pattern, target, len(model.blocks)):
            part, rest = _part(model, ours)
            for name, shape in part.wants().items():
                if name.startswith(rest):
                    found[f"{theirs}.{name.removeprefix(rest)}"] = Place(part, name, shape)
    return found


def expand(pattern: str, target: str, layers: int) -> Iterator[tuple[str, str]]:
    """All pairs that an entry of a `names` table stands for."""
    theirs, ours = _choices(pattern), _choices(target)
    assert len(theirs) == len(ours), f"{pattern!r} and {target!r} list different numbers of names"
    for a, b in zip(theirs, ours, strict=True):
        if "{}" not in a:
            yield a, b
            continue
        for layer in range(layers):
            yield a.replace("{}", str(layer)), b.replace("{}", str(layer))


def _choices(pattern: str) -> list[str]:
    """`x.{a,b}.y` -> `x.a.y`, `x.b.y`; `{}` stays."""
    found = re.search(r"\{([^{}]+)\}", pattern)
    if not found:
        return [pattern]
    before, behind = pattern[: found.start()], pattern[found.end() :]
    return [before + choice + behind for choice in found[1].split(",")]


def _part(model: Decoder, path: str) -> tuple[Part, str]:
    """The module at `path`, and the front of the names of its tensors that are meant: "" or "1."."""
    words = path.split(".")
    for depth in range(len(words), 0, -1):
        try:
            module = model.get_submodule(".".join(words[:depth]))
        except AttributeError:
            continue
        assert isinstance(module, Part), f"{path} has no weights"
        rest = ".".join(words[depth:])
        return module, f"{rest}." if rest else ""
    raise AssertionError(f"no part of the model is at {path}")


def _compare(model: Decoder, wanted: dict[str, Place], given: dict[str, tuple[int, ...]], tied: bool) -> None:
    """Raise CheckpointError that names all differences."""
    ignored = (*model.ignored, "lm_head.weight") if tied else model.ignored
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted and not name.endswith(ignored)]
    misshapen = [
        f"{name} {given[name]} (wanted {place.shape})"
        for name, place in wanted.items()
        if name in given and tuple(given[name]) != place.shape
    ]
    kinds = (("missing", missing), ("not known to the family", extra), ("of another shape", misshapen))
    if found := [_list(kind, names) for kind, names in kinds if names]:
        raise CheckpointError(
            f"the checkpoint does not fit its configuration ({model.config.model_type}): {'; '.join(found)}"
        )


def _list(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{more}"
