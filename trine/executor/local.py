"""One worker in this process, on a thread of its own.

Tensor operations let go of the interpreter, so while a step computes the caller goes on:
messages, heartbeat, the next schedule. The worker is made on the same thread, because compute
libraries keep their pools and settings by thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Protocol

from trine.core.types import Batch, Result

Masks = list[list[int] | None] | None


class Computes(Protocol):
    """What is asked of a worker: runtime/worker.py, or a test's own."""

    def forward(self, batch: Batch) -> None: ...
    def sample(self, batch: Batch, masks: Masks) -> None: ...
    def result(self, step: int) -> Result: ...
    def call(self, name: str, **values: Any) -> Any: ...


class LocalExecutor:
    """Orders are done one by one, in order. Returns once the worker stands; raises what it raised.

    A step that raised raises again from `result`. The steps behind it are still done, but the
    tenants of its slots have lost their place: they have to join again."""

    def __init__(self, make: Callable[[], Computes]) -> None:
        self._orders: SimpleQueue[Callable[[Computes], None] | None] = SimpleQueue()
        self._landed: dict[int, Result | BaseException] = {}
        self._failed: set[int] = set()  # steps whose forward raised; only the thread looks
        self._change = Condition()
        self._calls: list[Callable[[], None]] = []
        self._closed = False
        made: Future[None] = Future()
        self._thread = Thread(target=self._work, args=(make, made), name="trine-compute", daemon=True)
        self._thread.start()
        made.result()

    def forward(self, batch: Batch) -> None:
        self._order(lambda worker: self._forward(worker, batch))

    def sample(self, batch: Batch, masks: Masks) -> None:
        self._order(lambda worker: self._sample(worker, batch, masks))

    def done(self, step: int) -> bool:
        return step in self._landed

    def result(self, step: int) -> Result:
        with self._change:
            self._change.wait_for(lambda: step in self._landed or self._closed)
            landed = self._landed.pop(step, None)
        if landed is None:
            raise RuntimeError(f"step {step} is not there: the executor was closed")
        if isinstance(landed, BaseException):
            raise landed
        return landed

    def on_done(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def call(self, name: str, **values: Any) -> list[Any]:
        answer: Future[Any] = Future()
        self._order(lambda worker: _answer(answer, lambda: worker.call(name, **values)))
        return [answer.result()]

    def close(self) -> None:
        """Finishes what was ordered, and lets go of the worker."""
        if not self._closed:
            self._orders.put(None)
            self._thread.join()
            with self._change:
                self._closed = True
                self._change.notify_all()

    def _order(self, order: Callable[[Computes], None]) -> None:
        if self._closed:
            raise RuntimeError("the executor is closed")
        self._orders.put(order)

    def _work(self, make: Callable[[], Computes], made: Future[None]) -> None:
        try:
            worker = make()
        except BaseException as error:  # whoever waits for `made` raises it
            made.set_exception(error)
            return
        made.set_result(None)
        while order := self._orders.get():
            order(worker)

    def _forward(self, worker: Computes, batch: Batch) -> None:
        try:
            worker.forward(batch)
        except BaseException as error:  # raised again from result()
            self._failed.add(batch.step)
            self._land(batch.step, error)

    def _sample(self, worker: Computes, batch: Batch, masks: Masks) -> None:
        if batch.step in self._failed:
            self._failed.remove(batch.step)
            return
        try:
            worker.sample(batch, masks)
            landed = worker.result(batch.step)
        except BaseException as error:  # raised again from result()
            landed = error
        self._land(batch.step, landed)

    def _land(self, step: int, landed: Result | BaseException) -> None:
        with self._change:
            self._landed[step] = landed
            self._change.notify_all()
        for call in self._calls:
            call()


def _answer(answer: Future[Any], act: Callable[[], Any]) -> None:
    try:
        answer.set_result(act())
    except BaseException as error:  # raised again from call()
        answer.set_exception(error)
