"""Plugins: a plugin is a file in a folder, or an entry point of another package.

A plugin file ends with `PLUGIN = ItsClass`. Model files are their own plugin and are
imported by name (`family`), since there may be many. Of modules nothing is cached: the interpreter's
table of them already is the cache. What other packages offer is read from the disk once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from .errors import Unsupported


def find(kind: str) -> dict[str, Any]:
    """Plugins of a kind by name, e.g. `find("kernels.attention")`: files in our folder
    (all but `base`), and entry points of the group `trine.<kind>`."""
    package = import_module(f"trine.{kind}")
    found = {
        module.name: plugin
        for module in iter_modules(package.__path__)
        if module.name != "base"
        if (plugin := getattr(import_module(f"{package.__name__}.{module.name}"), "PLUGIN", None))
    }
    return found | {entry.name: entry.load() for entry in _offered(kind)}


def names(kind: str) -> list[str]:
    """Names of the plugins of a kind, without importing any of them: files that end with a PLUGIN, or models."""
    folder = import_module(f"trine.{kind}").__path__
    files = (m.name for m in iter_modules(folder) if m.name != "base")
    ours = (name for name in files if kind == "models" or "\nPLUGIN = " in _source(folder, name))
    return sorted({*ours, *(entry.name for entry in _offered(kind))})


def summaries(kind: str) -> dict[str, str]:
    """What the plugins of a kind say of themselves in their first line, without importing any of them; of another
    package's, nothing."""
    folder = import_module(f"trine.{kind}").__path__
    texts = {name: ast.get_docstring(ast.parse(_source(folder, name))) or "" for name in names(kind)}
    return {name: text.partition("\n")[0] for name, text in texts.items()}


def _source(folder: Iterable[str], name: str) -> str:
    files = [Path(path, f"{name}.py") for path in folder]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.exists())


def _offered(kind: str) -> EntryPoints:
    """By other packages."""
    return _everything().select(group=f"trine.{kind}")


@lru_cache(maxsize=1)
def _everything() -> Any:  # before Python 3.12 it has another type, with the same select
    """The entry points of all packages, whose files are some hundred."""
    return entry_points()


def get(kind: str, name: str) -> Any:
    """The plugin `name` of `kind`, and no other one is imported; Unsupported lists what there is."""
    folder = import_module(f"trine.{kind}").__path__
    offered = {entry.name for entry in _offered(kind)}
    ours = {module.name for module in iter_modules(folder)} - offered - {"base"}
    if name in ours and (plugin := getattr(import_module(f"trine.{kind}.{name}"), "PLUGIN", None)):
        return plugin
    found = find(kind)
    if name not in found:
        raise Unsupported(f"no {kind} is called {name!r}; there are: {', '.join(sorted(found))}")
    return found[name]


def family(model_type: str) -> ModuleType:
    """The model file of a `model_type`; Unsupported lists the families there are."""
    names = [m.name for m in iter_modules(import_module("trine.models").__path__) if m.name != "decoder"]
    if model_type.isidentifier() and model_type in names and find_spec(f"trine.models.{model_type}"):
        return import_module(f"trine.models.{model_type}")
    for entry in _offered("models"):
        if entry.name == model_type:
            return entry.load()
    raise Unsupported(f"no model family is called {model_type!r}; there are: {', '.join(sorted(names))}")
