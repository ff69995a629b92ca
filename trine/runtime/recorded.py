"""A model recorded once and run natively from then on, in the place of the model. It does not know what it does."""

from __future__ import annotations

from typing import Any

import torch

from trine.kernels.native.program import Program
from trine.kernels.native.tape import Tape


def record(model: Any, attention: list[Any], threads: int, rows: int) -> Program:
    """`rows`: whose logits are wanted at most. Unsupported if it does something that has no native form."""
    tape = Tape([backend.shape for backend in attention])
    with torch.device("cpu"):
        model(tape.step())
        keys, _ = attention[0].store.layer(0)
        program = Program(tape, threads, 8 * keys.element_size(), (rows, model.config.vocab_size))
    for backend in attention:
        backend.program = program
    return program
