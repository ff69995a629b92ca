"""Which graph stands for which rows: with a recorder that records by remembering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trine.runtime.graphs import Graphs

CPU = torch.device("cpu")


class Captured:
    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.call, self.value, self.replays = call, call(), 0

    def replay(self) -> None:
        self.replays += 1
        self.value.copy_(self.call())


class Recorder:
    def __init__(self) -> None:
        self.captured: list[Captured] = []

    def capture(self, call: Callable[[], Tensor]) -> Captured:
        self.captured.append(Captured(call))
        return self.captured[-1]


def logits(slots: Tensor) -> Tensor:
    return (slots[:, None] * torch.tensor([1.0, 10.0])).float()


def padded(rows: list[int], bucket: int) -> Tensor:
    return torch.tensor(rows + [0] * (bucket - len(rows)), dtype=torch.int32)


def make(buckets: list[int]) -> tuple[Graphs, Recorder, list[int]]:
    ran: list[int] = []

    def run(slots: Tensor) -> Tensor:
        ran.append(len(slots))
        return logits(slots)

    recorder = Recorder()
    return Graphs(run, recorder, buckets, CPU), recorder, ran


def test_the_smallest_bucket_that_holds_the_rows() -> None:
    graphs, _, _ = make([1, 2, 4, 8])
    assert [graphs.bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]


def test_eager_then_recorded_then_replayed_with_the_same_numbers() -> None:
    graphs, recorder, ran = make([4])
    for rows in ([3, 1], [5, 2, 7], [9], [1, 2, 3, 4]):
        found = graphs.logits(padded(rows, 4), len(rows))
        assert torch.equal(found, logits(torch.tensor(rows)))
    assert len(recorder.captured) == 1 and recorder.captured[0].replays == 3
    assert ran[0] == 4


def test_warm_records_every_bucket_with_rows_of_nobody() -> None:
    graphs, recorder, _ = make([1, 2, 4])
    seen: list[Any] = []

    def fill(bucket: int) -> Tensor:
        seen.append(bucket)
        return padded([], bucket)

    assert graphs.warm(fill) == 3 == len(recorder.captured)
    assert seen[0] == 4, "the largest first: smaller ones use its memory"
    assert torch.equal(graphs.logits(padded([6], 2), 1), logits(torch.tensor([6])))
    assert len(recorder.captured) == 3


def test_what_is_best_is_settled_before_a_bucket_runs_and_before_it_is_recorded() -> None:
    happened: list[tuple[str, int]] = []

    def run(slots: Tensor) -> Tensor:
        happened.append(("run", len(slots)))
        return logits(slots)

    graphs = Graphs(run, Recorder(), [2, 4], CPU, lambda rows: happened.append(("settle", rows)))
    for _ in range(2):
        graphs.logits(padded([1], 2), 1)
    assert happened == [("settle", 2), ("run", 2)] * 2 + [("run", 2)]  # the recorder's replay runs too
    graphs.logits(padded([1], 2), 1)
    assert [what for what, _ in happened].count("settle") == 2
