"""The fake device notices what a real one would only suffer: each check of it can fail."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.kit.fake import FakeExecutor
from tests.kit.grammar import allowed, forced
from tests.kit.oracle import oracle
from trine.core.types import Batch, Copy, Grant, Group, Join, Row, Sampling, Write

SAMPLING = Sampling(temperature=1.0, seed=5, max_tokens=6)
PROMPT = [4, 8, 15, 16, 23, 42]


def join(slot: int, pages: list[list[int]], tokens: list[int] = PROMPT, computed: int = 0) -> Join:
    return Join(slot, array("i", tokens).tobytes(), min(len(tokens), len(PROMPT)), pages, computed, SAMPLING)


def step(device: FakeExecutor, rows: list[Row], masks: Any = None, **orders: Any) -> list[list[int]]:
    batch = Batch(device.step + 1, rows, **orders)
    device.forward(batch)
    device.sample(batch, masks)
    return device.result(batch.step).tokens


def device(*windows: int, **options: Any) -> FakeExecutor:
    return FakeExecutor([Group(20, w) for w in windows or (0,)], 4, 4, 40, **options)


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 5), (4, 1)])
@pytest.mark.parametrize("chunk", [1, 2, 6])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("lazy", [False, True])
def test_it_gives_the_oracles_answer(windows: tuple[int, ...], chunk: int, drafts: int, lazy: bool) -> None:
    fake = device(*windows, drafts=drafts, lazy=lazy)
    pages = [[1, 2, 3, 4, 5]] * len(windows)
    got: list[int] = []
    for start in range(0, 6, chunk):
        joins = [join(1, pages)] if start == 0 else []
        got += step(fake, [Row(1, chunk, start + chunk == 6)], joins=joins)[0]
    while len(got) < 6:
        got += step(fake, [Row(1, 1 + drafts, True, drafts)])[0]
    want, why = oracle(fake.model, PROMPT, SAMPLING, 40)
    assert got[:6] == want
    assert why == "length"


def test_a_copy_and_a_foreign_page() -> None:
    fake = device()
    step(fake, [Row(1, 6, True)], joins=[join(1, [[1, 2]])])
    other = join(2, [[1, 3]], PROMPT, 5)
    again = step(fake, [Row(2, 1, True)], joins=[other], copies=[Copy(0, 2, 3, 1)])
    assert again[0] == oracle(fake.model, PROMPT, SAMPLING, 40)[0][:1]
    with pytest.raises(AssertionError, match="position 4, page 4, holds something else"):
        changed = [*PROMPT[:4], 1, 2]
        step(fake, [Row(3, 1, True)], joins=[join(3, [[1, 4]], changed, 5)], copies=[Copy(0, 2, 4, 1)])


@pytest.mark.parametrize(
    ("rows", "orders", "match"),
    [
        ([Row(0, 6, True)], {"joins": [join(0, [[1, 2]])]}, "slot 0"),
        ([Row(1, 6, True)], {"joins": [join(1, [[1, 0]])]}, "no page"),
        ([Row(1, 6, True)], {"joins": [join(1, [[1]])]}, "no page"),
        ([Row(1, 1, True)], {"joins": [join(1, [[1, 2]], PROMPT, 5)]}, "poison"),
        ([Row(1, 7, True)], {"joins": [join(1, [[1, 2]])]}, "samples after"),
        ([Row(1, 7, False)], {"joins": [join(1, [[1, 2]])]}, "input token"),
        ([Row(1, 7, True, 1)], {"joins": [join(1, [[1, 2]])]}, "input token"),
        ([Row(1, 5, True)], {"joins": [join(1, [[1, 2]])]}, "samples after"),
        ([Row(1, 3, False)] * 2, {"joins": [join(1, [[1, 2]])]}, "two rows"),
        ([Row(1, 1, True)], {"joins": [join(1, [[1, 2]], PROMPT, 6)]}, "nothing to compute"),
        ([Row(1, 6, True)], {"joins": [join(1, [[1]])], "grants": [Grant(1, 0, 2, [2])]}, "hole"),
        ([Row(1, 6, True)], {"joins": [join(1, [[1, 2]])], "copies": [Copy(0, 3, 2, 4)]}, "not a copy"),
        ([], {}, "no rows"),
    ],
)
def test_what_it_refuses(rows: list[Row], orders: dict[str, Any], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        step(device(), rows, **orders)


def test_freed_pages_are_spoiled_in_order_with_the_steps() -> None:
    fake = device(lazy=True)
    first = Batch(1, [Row(1, 6, True)], [join(1, [[1, 2]])])
    fake.forward(first)
    fake.sample(first, None)
    fake.poison(0, [1])
    assert fake.result(1).tokens[0]
    with pytest.raises(AssertionError, match="position 0, page 1, holds poison"):
        step(fake, [Row(1, 1, True)])


def test_a_page_behind_the_window_is_not_read() -> None:
    fake = device(3)
    step(fake, [Row(1, 6, True)], joins=[join(1, [[1, 2, 3]])])
    fake.poison(0, [1])
    assert step(fake, [Row(1, 1, True)])[0]
    fake = device(4)
    step(fake, [Row(1, 6, True)], joins=[join(1, [[1, 2, 3]])])
    fake.poison(0, [1])
    with pytest.raises(AssertionError, match="position 3"):
        step(fake, [Row(1, 1, True)])


def test_masks_and_writes() -> None:
    fake = device(drafts=2)
    assert step(fake, [Row(1, 6, True)], [[7]], joins=[join(1, [[1, 2, 3]])]) == [[7]]
    with pytest.raises(AssertionError, match="input token"):  # guesses are stale once tokens were written
        step(fake, [Row(1, 5, True, 2)], writes=[Write(1, [1, 2])])
    fake = device(drafts=2)
    step(fake, [Row(1, 6, True)], joins=[join(1, [[1, 2, 3]])])
    assert step(fake, [Row(1, 3, True)], [[9, 9]], writes=[Write(1, [1, 2])]) == [[9]]
    with pytest.raises(AssertionError, match="mask"):
        step(fake, [Row(1, 3, True, 2)], [[9]])


def test_the_end_of_an_answer_is_not_too_early() -> None:
    model = device().model
    free = oracle(model, PROMPT, Sampling(seed=1, max_tokens=30), 60)[0]
    stops = tuple(range(50))
    assert oracle(model, PROMPT, Sampling(seed=1, max_tokens=30, stop_ids=stops), 60) == (free[:1], "stop")
    assert oracle(model, PROMPT, Sampling(seed=1, max_tokens=30), 10) == (free[:4], "length")
    late = oracle(
        model, PROMPT, Sampling(seed=1, max_tokens=9, min_tokens=8, stop_ids=(free[0], free[1])), 60
    )[0]
    assert len(late) >= 8


def test_the_toy_grammar() -> None:
    assert allowed(0, [5]) is None
    assert forced(1, [5]) == [7, 11, 13]
    assert forced(1, [5, 7]) == [11, 13]
    assert forced(1, [5, 7, 11, 13]) == []
    assert allowed(3, [5, 7, 11, 13, 9]) == [1, 2, 4]
    assert forced(4, [1, 2, 3, 4, 5]) == [9, 11, 13]
