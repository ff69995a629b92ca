"""From what a person types to a path: a folder or .gguf file, a name of the catalog, or a hub id.

In that order. A name is looked at before it is used: what is none of the three reaches neither the
catalog, the hub, nor any path but the one that was typed.
"""

from __future__ import annotations

from pathlib import Path

from .. import catalog
from ..catalog import Progress
from ..errors import ConfigError
from . import hub

NAME_BYTES = 1024


def locate(ref: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The local path of the model `ref`, fetched if need be; `progress(done, total)` is told of bytes."""
    _check(ref)
    try:
        path = Path(ref).expanduser()
        is_local = path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file())
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{ref} cannot be looked at: {error}", "model") from None
    if revision is not None and (is_local or ref in catalog.MODELS):
        raise ConfigError(f"a revision is for hub ids; {ref} is not one, so leave it out", "revision")
    if is_local:
        return path
    if ref in catalog.MODELS:
        return catalog.pull(ref, progress)
    if path.exists():
        raise ConfigError(
            f"{ref} is a file, but not a .gguf file; give a model folder or a .gguf file", "model"
        )
    if hub.is_id(ref) and path.suffix.lower() != ".gguf":
        return hub.fetch(ref, revision)
    if "/" in ref or "\\" in ref or ref.startswith((".", "~")) or path.suffix.lower() == ".gguf":
        raise ConfigError(
            f"there is no folder or .gguf file {ref}, and it is not a hub id (org/name)", "model"
        )
    raise ConfigError(
        f"no model is called {ref!r}: {catalog.near(ref)} Otherwise give a folder, a .gguf file, or a hub id org/name",
        "model",
    )


def _check(ref: str) -> None:
    if not ref or len(ref.encode(errors="replace")) > NAME_BYTES or not ref.isprintable():
        raise ConfigError(
            f"the model {ref[:60]!r} is not a name: 1 to {NAME_BYTES} bytes that can be printed are wanted",
            "model",
        )
