"""The seam for how many workers there are, and on which machines.

Everything is enqueued in order; `result` waits for one step only. A step that raised on
the device raises again from `result`.
"""

from __future__ import annotations

from typing import Any, Protocol

from trine.core.types import Batch, Result


class Executor(Protocol):
    def forward(self, batch: Batch) -> None:
        """Enqueue; returns at once."""
        ...

    def sample(self, batch: Batch, masks: list[list[int] | None] | None) -> None:
        """Enqueue the sampling of a batch whose forward was enqueued.

        `masks`: by row, the ids that are allowed (None: all)."""
        ...

    def done(self, step: int) -> bool:
        """Whether `result(step)` would return (or raise) without waiting."""
        ...

    def result(self, step: int) -> Result:
        """Wait for this step only, and take its result."""
        ...

    def on_done(self, call: Any) -> None:
        """`call()` is run, from any thread, each time a step's result is there."""
        ...

    def call(self, name: str, **values: Any) -> list[Any]:
        """Something rare, on each worker, in order with the steps."""
        ...

    def close(self) -> None: ...
