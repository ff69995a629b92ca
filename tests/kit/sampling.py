"""Rows to sample for, made without a table: what each asks, in plain Python."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from trine.core.types import Sampling
from trine.kernels.sampling.base import ERRORS, Choice, Rows
from trine.kernels.table.base import make_state
from trine.runtime.table import make_ask


class Ask(NamedTuple):
    """One row, in plain Python."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    seed: int = 1
    min_tokens: int = 0
    prompt: tuple[int, ...] = (3, 5, 3)
    output: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    logprobs: int | None = None

    @property
    def early(self) -> bool:
        return len(self.output) < self.min_tokens


def make_rows(asks: list[Ask], device: Any = "cpu") -> Rows:
    """A slot for each, from 1 on; on another device than a CPU indices are int32."""
    longest = max(len(a.prompt) + len(a.output) for a in asks)
    state = make_state(len(asks) + 1, longest + 1, 1, 1, 16, "cpu")
    told = []
    for slot, a in enumerate(asks, 1):
        sampling = Sampling(
            a.temperature, a.top_p, a.top_k, a.min_p, a.repetition, a.presence, a.frequency, a.seed,
            min_tokens=a.min_tokens, stop_ids=a.stops, bias=dict(a.bias), logprobs=a.logprobs,
        )  # fmt: skip
        told.append(make_ask(sampling, len(a.prompt)))
        state.reals[slot] = torch.tensor(told[-1].reals, dtype=torch.float64)
        state.wholes[slot] = torch.tensor(told[-1].wholes)
        ids = [*a.prompt, *a.output]
        state.tokens[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        state.known[slot], state.prompt[slot] = len(ids), len(a.prompt)
    kind = torch.int64 if device == "cpu" else torch.int32
    if device != "cpu":
        moved = make_state(len(asks) + 1, longest + 1, 1, 1, 16, device)
        moved.arena.copy_(state.arena)
        state = moved
    return Rows(
        state=state,
        slots=torch.arange(1, len(asks) + 1, dtype=kind, device=device),
        asks=told,
        early=[i for i, a in enumerate(asks) if a.early],
        allowed={i: np.array(a.allowed, np.int64) for i, a in enumerate(asks) if a.allowed is not None},
        upload=lambda values: torch.from_numpy(np.asarray(values, np.int64)).to(device, kind),
    )


def error_names(choice: Choice) -> list[str | None]:
    return [ERRORS[code] for code in choice.errors.tolist()]
