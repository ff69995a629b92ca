"""The step, under a name that models may import: they hand it on and look at ids, positions and wanted."""

from __future__ import annotations

from trine.kernels.attention.base import Step

__all__ = ["Step"]
