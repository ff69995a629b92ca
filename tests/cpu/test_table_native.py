"""The table of the native library: any orders leave the reference's bits, and none leads out of it."""

from __future__ import annotations

import pytest
import torch

from tests.kit.table import check_long_prompt, check_random_orders, check_singles, tables
from trine.kernels.fused.base import Want
from trine.kernels.table.native import DEEP, Native


@pytest.fixture
def kernel() -> Native:
    if reason := Native.cannot(Want("float32", "cpu", (0, 0))):
        pytest.skip(reason)
    return Native()


@pytest.mark.parametrize("seed", range(4))
def test_random_orders_and_steps(kernel: Native, seed: int) -> None:
    check_random_orders(kernel, 120, seed)


def test_singles_with_rows_of_nobody(kernel: Native) -> None:
    check_singles(kernel)


def test_prompts_longer_than_a_piece(kernel: Native) -> None:
    check_long_prompt(kernel)


def test_tokens_of_either_width(kernel: Native) -> None:
    _, t = tables(kernel)
    t.append(t.slots([2, 5, 1]), torch.tensor([7, 8, 9]))
    t.append(t.slots([2, 5, 1]), torch.tensor([[1, 2, 3], [0, 0, 0]], dtype=torch.int32)[0])
    t.append(t.slots([2, 5, 1]), torch.tensor([[4, 0], [5, 0], [6, 0]])[:, 0])
    assert t.state.tokens[[2, 5, 1], :3].tolist() == [[7, 1, 4], [8, 2, 5], [9, 3, 6]]
    assert t.state.known.tolist() == [0, 3, 3, 0, 0, 3]


def test_results_hold_for_a_while(kernel: Native) -> None:
    _, t = tables(kernel)
    steps = [t.singles(t.slots([3])) for _ in range(DEEP)]
    assert [step.positions.item() for step in steps] == list(range(DEEP))


def test_nothing_leads_out_of_the_table(kernel: Native) -> None:
    _, t = tables(kernel, max_len=8)
    before = t.state.arena.clone()
    words = len(before)
    for run in ([words - 1, 0, 2, -1], [0, 5, 2, -1], [-1, 0, 1, -1], [0, 0, -1, -1], [0, 0, 1, 6]):
        with pytest.raises(AssertionError, match="run 0"):
            kernel.apply(t.state, torch.tensor([1, 2, *run], dtype=torch.int32), 1)
    for slots in ([6], [-1]):
        with pytest.raises(AssertionError, match="has no place"):
            kernel.singles(t.state, torch.tensor(slots))
        with pytest.raises(AssertionError, match="is none"):
            kernel.append(t.state, torch.tensor(slots), torch.tensor([5]))
    with pytest.raises(AssertionError, match="row 1"):
        kernel.ragged(t.state, torch.tensor([1, 2]), torch.tensor([0, 1, 10]), torch.tensor([0] + [1] * 9))
    t.state.computed[3], t.state.known[3] = 8, 9
    with pytest.raises(AssertionError, match="has no place"):
        kernel.singles(t.state, torch.tensor([3]))
    with pytest.raises(AssertionError, match="slot 3 is full"):
        kernel.append(t.state, torch.tensor([3]), torch.tensor([5]))
    t.state.computed[[1, 3]], t.state.known[3] = 0, 0
    assert torch.equal(t.state.arena, before)
