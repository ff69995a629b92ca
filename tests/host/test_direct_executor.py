"""The executor of a device that works by itself: order, errors, being told, closing."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from trine.core.types import Batch, Result, Row
from trine.executor.direct import DirectExecutor


class Worker:
    """Steps are over when the test says so."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, int]] = []
        self.over: dict[int, Event] = {}
        self.breaks: set[tuple[str, int]] = set()

    def forward(self, batch: Batch) -> None:
        self._order("forward", batch.step)

    def sample(self, batch: Batch, masks: Any) -> None:
        self._order("sample", batch.step)
        self.over.setdefault(batch.step, Event())

    def done(self, step: int) -> bool:
        return step in self.over and self.over[step].is_set()

    def wait(self, step: int) -> None:
        assert self.over[step].wait(30)
        if ("wait", step) in self.breaks:
            raise RuntimeError(f"the device broke in step {step}")

    def result(self, step: int) -> Result:
        self.wait(step)
        return Result(step, [[step]])

    def call(self, name: str, **values: Any) -> Any:
        return name, values

    def _order(self, kind: str, step: int) -> None:
        self.orders.append((kind, step))
        if (kind, step) in self.breaks:
            raise RuntimeError(f"{kind} {step} broke")


def batch(step: int) -> Batch:
    return Batch(step, [Row(1, 1, True)])


@pytest.fixture
def executor():
    made = DirectExecutor(Worker)
    yield made
    for over in made.worker.over.values():
        over.set()
    made.close()


def test_orders_are_passed_on_at_once_and_in_order(executor: DirectExecutor) -> None:
    for step in (1, 2):
        executor.forward(batch(step))
        executor.sample(batch(step), None)
    assert executor.worker.orders == [("forward", 1), ("sample", 1), ("forward", 2), ("sample", 2)]
    assert not executor.done(1)
    executor.worker.over[1].set()
    assert executor.done(1) and not executor.done(2)
    assert executor.result(1).tokens == [[1]]
    assert executor.call("memory", of="kv") == [("memory", {"of": "kv"})]


@pytest.mark.parametrize("kind", ["forward", "sample"])
def test_what_an_order_raised_comes_from_its_result(executor: DirectExecutor, kind: str) -> None:
    executor.worker.breaks.add((kind, 1))
    executor.forward(batch(1))
    executor.sample(batch(1), None)
    executor.forward(batch(2))
    executor.sample(batch(2), None)
    assert executor.done(1)
    with pytest.raises(RuntimeError, match=f"{kind} 1 broke"):
        executor.result(1)
    executor.worker.over[2].set()
    assert executor.result(2).tokens == [[2]]


def test_others_are_told_when_a_step_is_over_or_broken(executor: DirectExecutor) -> None:
    told = Event()
    executor.on_done(told.set)
    executor.worker.breaks |= {("wait", 2), ("forward", 3)}
    for step in (1, 2, 3):
        told.clear()
        executor.forward(batch(step))
        executor.sample(batch(step), None)
        if step < 3:
            assert not executor.done(step)
            executor.worker.over[step].set()
        assert told.wait(30) and executor.done(step)
    assert executor.result(1).tokens == [[1]]
    with pytest.raises(RuntimeError, match="the device broke in step 2"):
        executor.result(2)
    with pytest.raises(RuntimeError, match="forward 3 broke"):
        executor.result(3)


def test_closed_is_closed() -> None:
    executor = DirectExecutor(Worker)
    executor.on_done(lambda: None)
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.forward(batch(1))
    with pytest.raises(RuntimeError, match="closed"):
        executor.result(1)


def test_a_listener_that_raises_is_no_harm_to_others(executor: DirectExecutor) -> None:
    told = Event()

    def broken() -> None:
        raise RuntimeError("gone")

    executor.on_done(broken)
    executor.on_done(told.set)
    for step in (1, 2):
        told.clear()
        executor.forward(batch(step))
        executor.sample(batch(step), None)
        executor.worker.over[step].set()
        assert told.wait(30)


def test_whoever_comes_late_is_told_of_what_flies(executor: DirectExecutor) -> None:
    executor.forward(batch(1))
    executor.sample(batch(1), None)
    told = Event()
    executor.on_done(told.set)
    executor.worker.over[1].set()
    assert told.wait(30)


def test_a_listener_may_close() -> None:
    executor, closed = DirectExecutor(Worker), Event()

    def close() -> None:
        executor.close()
        closed.set()

    executor.on_done(close)
    executor.forward(batch(1))
    executor.sample(batch(1), None)
    executor.worker.over[1].set()
    assert closed.wait(30)
    with pytest.raises(RuntimeError, match="closed"):
        executor.on_done(close)


def test_a_result_is_taken_once(executor: DirectExecutor) -> None:
    executor.forward(batch(1))
    executor.sample(batch(1), None)
    executor.worker.over[1].set()
    executor.result(1)
    for step in (1, 2):
        with pytest.raises(RuntimeError, match=f"step {step} is not there"):
            executor.result(step)
