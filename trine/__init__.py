"""Trine: an engine for serving large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .core.types import Sampling
    from .llm import LLM, AsyncLLM

__all__ = ["LLM", "AsyncLLM", "Sampling"]


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for, so that `import trine` stays cheap."""
    if name == "Sampling":
        from .core.types import Sampling

        return Sampling
    if name in ("LLM", "AsyncLLM"):
        from . import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'trine' has no attribute {name!r}")
