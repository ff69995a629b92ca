"""Where untrusted programs run: pooled child processes with CPU, memory and wall limits.

Chat templates and GGUF headers come with a model, so they are somebody else's programs. They
run in a child that holds nothing, may open nothing it does not need, and is killed when it
takes too much (rule S4 of the architecture).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .pool import Exceeded, Failed, Sandbox, SandboxError

__all__ = ["Exceeded", "Failed", "Sandbox", "SandboxError"]


def __getattr__(name: str) -> Any:
    """The parent's side is imported when first asked for: a child imports this package too, and
    starts twice as fast without it."""
    if name in __all__:
        from . import pool

        return getattr(pool, name)
    raise AttributeError(f"module 'trine.sandbox' has no attribute {name!r}")
