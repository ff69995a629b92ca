"""One worker in this process whose device works by itself: orders are only enqueued.

There is no thread between the caller and the device, so the host's part of a step is as short as it can be.
A thread of its own waits for results only where somebody wants to be told of them (`on_done`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Protocol

from trine.core.types import Batch, Result

log = logging.getLogger(__name__)

Masks = list[list[int] | None] | None


class Enqueues(Protocol):
    """What is asked of a worker: runtime/worker.py, or a test's own."""

    def forward(self, batch: Batch) -> None: ...
    def sample(self, batch: Batch, masks: Masks) -> None: ...
    def done(self, step: int) -> bool: ...
    def wait(self, step: int) -> None: ...
    def result(self, step: int) -> Result: ...
    def call(self, name: str, **values: Any) -> Any: ...


class DirectExecutor:
    """Orders go to the worker on the caller's thread. Raises what making the worker raises.

    A step that raised raises again from `result`."""

    def __init__(self, make: Callable[[], Enqueues]) -> None:
        self.worker = make()
        self._failed: dict[int, BaseException] = {}
        self._flying: list[int] = []  # steps that were sampled, and whose result nobody took
        self._waiting: SimpleQueue[int | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._calls: list[Callable[[], None]] = []
        self._closed = False

    def forward(self, batch: Batch) -> None:
        self._open()
        try:
            self.worker.forward(batch)
        except BaseException as error:  # raised again from result()
            self._failed[batch.step] = error

    def sample(self, batch: Batch, masks: Masks) -> None:
        self._open()
        if batch.step not in self._failed:
            try:
                self.worker.sample(batch, masks)
            except BaseException as error:  # raised again from result()
                self._failed[batch.step] = error
        self._flying.append(batch.step)
        if self._calls:
            self._waiting.put(batch.step)

    def done(self, step: int) -> bool:
        return step in self._failed or self.worker.done(step)

    def result(self, step: int) -> Result:
        if step not in self._flying or self._closed:
            why = "the executor was closed" if self._closed else "it was not sampled, or was taken"
            raise RuntimeError(f"step {step} is not there: {why}")
        self._flying.remove(step)
        if error := self._failed.pop(step, None):
            raise error
        return self.worker.result(step)

    def on_done(self, call: Callable[[], None]) -> None:
        self._open()
        self._calls.append(call)
        if self._thread is None:
            for step in self._flying:
                self._waiting.put(step)
            self._thread = Thread(target=self._watch, name="trine-results", daemon=True)
            self._thread.start()

    def call(self, name: str, **values: Any) -> list[Any]:
        self._open()
        return [self.worker.call(name, **values)]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._thread is not None:
                self._waiting.put(None)
                if self._thread is not current_thread():
                    self._thread.join()

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError("the executor is closed")

    def _watch(self) -> None:
        """Wait for each step in order. What went wrong with one is for `result` to raise."""
        while (step := self._waiting.get()) is not None:
            if step not in self._failed:
                try:
                    self.worker.wait(step)
                except BaseException as error:
                    self._failed.setdefault(step, error)
            for call in self._calls:
                try:
                    call()
                except Exception:  # one that cannot be told must not keep the others from hearing of it
                    log.exception("somebody could not be told that a step is done")
