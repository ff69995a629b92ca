"""Torch without what only its compilers need, in a process that is to start fast.

`import torch` takes a third of its time for torch._meta_registrations: shapes of results computed in Python,
which a compiler asks for, and meta devices and generators of random numbers. Serving on a CPU has none of
them. It is left out until somebody imports a compiler, or says `fetch`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PUT_OFF = "torch._meta_registrations"  # imported for what it registers: nothing in it is asked for by name
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.onnx")


class Later:
    """Stands where the module would be; the real one comes before the first compiler does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == PUT_OFF:
            loader: Any = self  # importlib.abc has a type for it, and takes long to import
            return ModuleSpec(name, loader)
        if name in COMPILERS and PUT_OFF in sys.modules:
            fetch()
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual one."""

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def fetch() -> None:
    """All of torch from here on: the real module, in the place of the empty one."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, Later)]:
        sys.meta_path.remove(finder)
        if sys.modules.pop(PUT_OFF, None):
            import_module(PUT_OFF)


def install() -> None:
    """Before torch is imported; afterwards it would come too late."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, Later())
