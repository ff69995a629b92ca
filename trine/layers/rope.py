"""Rotary positions: a table of cosines and sines by position, made once.

Kinds of scaling: `default` (none), `linear` (positions divided by a factor), `llama3` (low frequencies
divided, high ones kept, a smooth passage between: as in Llama 3.1's release).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trine.errors import CheckpointError, Unsupported
from trine.kernels.fused.base import Fused


class Rope(nn.Module):
    """By how much queries and keys are turned at each position; attention does it."""

    def __init__(
        self, head_dim: int, theta: float, scaling: dict[str, Any], max_len: int, fused: Fused
    ) -> None:
        super().__init__()
        self.fused = fused
        angles = torch.arange(max_len).float()[:, None] * frequencies(head_dim, theta, scaling)
        cos, sin = angles.cos(), angles.sin()
        self.table = torch.cat((cos, cos, -sin, sin), -1)  # [positions, 2 * dim]

    def forward(self, positions: Tensor) -> Any:
        """What attention needs of a step's positions; the same for all layers that turn alike."""
        return self.fused.turn(self.table, positions)


def frequencies(head_dim: int, theta: float, scaling: dict[str, Any]) -> Tensor:
    """[head_dim / 2]: radians a position."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    match kind := scaling.get("rope_type", scaling.get("type", "default")):
        case "default" | None:
            return plain
        case "linear":
            return plain / _number(scaling, "factor")
        case "llama3":
            return _llama3(plain, scaling)
        case _:
            raise Unsupported(f"rope scaling {kind!r} is not known; there are: default, linear, llama3")


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    factor, low, high = (_number(scaling, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = _number(scaling, "original_max_position_embeddings") * plain / (2 * math.pi)
    if high == low:
        raise CheckpointError(f"rope scaling: low_freq_factor and high_freq_factor are both {low}")
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _number(scaling: dict[str, Any], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"rope scaling: {name} must be a positive number, found {value!r}")
    return float(value)
