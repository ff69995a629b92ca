"""The closed table of what a sandbox child can do. Nothing else has a name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Task(NamedTuple):
    """Where a task's function is, and whether it may open files. The module is ours, and is
    imported before the budget of the first call starts."""

    module: str
    function: str
    files: bool = False

    def load(self) -> Callable[[Any], Any]:
        return getattr(import_module(self.module), self.function)


TASKS = {
    "template.render": Task("trine.sandbox.template", "render"),
    "template.check": Task("trine.sandbox.template", "check"),
    "gguf.header": Task("trine.loader.header", "read", files=True),  # payload: the file's path
}
