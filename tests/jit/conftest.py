"""Kernels run under Triton's interpreter, on CPU tensors: it must be chosen before triton is imported."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

with suppress(ImportError):
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Its scalars are arrays of one element, which numpy 2.4 no longer takes for a bound of `range`."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
