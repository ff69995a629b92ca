"""The compute thread: orders in order, the caller goes on, errors come back where they belong."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread, current_thread
from typing import Any

import pytest

from trine.core.types import Batch, Result, Row
from trine.executor.local import LocalExecutor

PATIENCE = 20.0  # seconds after which a test gives up


class Worker:
    """Notes what it is told; waits for `go` in each forward; breaks on the steps it is told to."""

    def __init__(self, broken: tuple[int, ...] = (), deaf: tuple[int, ...] = ()) -> None:
        self.said: list[tuple[str, int]] = []
        self.threads = {current_thread().name}
        self.entered, self.go = Event(), Event()
        self.broken, self.deaf = broken, deaf

    def forward(self, batch: Batch) -> None:
        self.entered.set()
        assert self.go.wait(PATIENCE)
        self.threads.add(current_thread().name)
        self.said.append(("forward", batch.step))
        if batch.step in self.broken:
            raise ValueError(f"broken in step {batch.step}")

    def sample(self, batch: Batch, masks: list[list[int] | None] | None) -> None:
        self.said.append(("sample", batch.step))
        if batch.step in self.deaf:
            raise KeyError(batch.step)
        self.masks = masks

    def result(self, step: int) -> Result:
        return Result(step, [[step]])

    def call(self, name: str, **values: Any) -> Any:
        if name != "add":
            raise LookupError(name)
        self.said.append((name, 0))
        return sum(values.values())


@contextmanager
def running(worker: Worker) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(lambda: worker)
    try:
        yield executor
    finally:
        worker.go.set()
        executor.close()


def batch(step: int) -> Batch:
    return Batch(step, [Row(1, 1, True)])


def launch(executor: LocalExecutor, *steps: int) -> None:
    for step in steps:
        executor.forward(batch(step))
        executor.sample(batch(step), None)


def test_the_caller_goes_on_while_a_step_computes() -> None:
    worker = Worker()
    with running(worker) as executor:
        launch(executor, 1, 2)  # returns although no step can end
        assert worker.entered.wait(PATIENCE)
        assert not executor.done(1) and worker.said == []
        worker.go.set()
        assert executor.result(2).tokens == [[2]]  # the second may be asked for first
        assert executor.done(1) and executor.result(1).tokens == [[1]]
        assert not executor.done(1)  # taken
        assert worker.said == [("forward", 1), ("sample", 1), ("forward", 2), ("sample", 2)]
        assert "trine-compute" in worker.threads


def test_the_worker_is_made_on_the_thread_it_computes_on() -> None:
    made: list[Worker] = []

    def make() -> Worker:
        made.append(Worker())
        return made[0]

    executor = LocalExecutor(make)
    made[0].go.set()
    launch(executor, 1)
    executor.result(1)
    executor.close()
    assert len(made[0].threads) == 1 and current_thread().name not in made[0].threads


def test_each_result_is_told_once() -> None:
    worker, told = Worker(broken=(2,), deaf=(3,)), []
    arrived = Event()
    with running(worker) as executor:
        executor.on_done(lambda: (told.append(1), len(told) == 4 and arrived.set()))
        launch(executor, 1, 2, 3, 4)
        assert not told
        worker.go.set()
        assert arrived.wait(PATIENCE)
        assert all(executor.done(step) for step in (1, 2, 3, 4))
    assert len(told) == 4


def test_errors_come_back_from_their_own_step() -> None:
    worker = Worker(broken=(2,), deaf=(3,))
    worker.go.set()
    with running(worker) as executor:
        launch(executor, 1, 2, 3, 4)
        assert executor.result(4).tokens == [[4]]  # the steps behind are done
        with pytest.raises(ValueError, match="broken in step 2"):
            executor.result(2)
        with pytest.raises(KeyError):
            executor.result(3)
        assert executor.result(1).tokens == [[1]]
        assert ("sample", 2) not in worker.said
        worker.broken, arrived = (), Event()
        executor.on_done(arrived.set)
        launch(executor, 2)  # the same step again
        assert arrived.wait(PATIENCE)
        assert executor.result(2).tokens == [[2]]


def test_a_mask_may_come_later() -> None:
    worker = Worker()
    worker.go.set()
    with running(worker) as executor:
        executor.forward(batch(1))
        assert executor.call("add", a=1) == [1]  # a call is in order: the forward is over
        assert worker.said == [("forward", 1), ("add", 0)] and not executor.done(1)
        executor.sample(batch(1), [[7, 8]])
        assert executor.result(1).tokens == [[1]] and worker.masks == [[7, 8]]


def test_calls() -> None:
    worker = Worker()
    with running(worker) as executor:
        assert executor.call("add", a=2, b=3) == [5]
        with pytest.raises(LookupError):
            executor.call("subtract")


def test_what_making_a_worker_raised() -> None:
    def make() -> Worker:
        raise FileNotFoundError("no such model")

    with pytest.raises(FileNotFoundError, match="no such model"):
        LocalExecutor(make)


def test_close_finishes_what_was_ordered_and_frees_the_worker() -> None:
    workers = [Worker()]
    gone = weakref.ref(workers[0])
    workers[0].go.set()
    executor = LocalExecutor(workers.pop)
    launch(executor, 1)
    executor.close()
    executor.close()
    assert executor.result(1).tokens == [[1]]
    assert gone() is None
    with pytest.raises(RuntimeError, match="closed"):
        executor.forward(batch(2))


def test_close_wakes_who_waits_for_nothing() -> None:
    worker, raised = Worker(), []

    def wait() -> None:
        try:
            executor.result(9)
        except RuntimeError as error:
            raised.append(str(error))

    with running(worker) as executor:
        waiting = Thread(target=wait)
        waiting.start()
    waiting.join(PATIENCE)
    assert raised and "step 9" in raised[0]
