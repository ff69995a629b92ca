"""The table in Triton, under the interpreter: any orders leave the reference's bits."""

from __future__ import annotations

import pytest

from tests.kit.table import check_long_prompt, check_random_orders, check_singles

pytest.importorskip("triton", reason="triton is not installed")

from trine.kernels.table.triton import Triton


def test_random_orders_and_steps() -> None:
    check_random_orders(Triton())


def test_singles_with_rows_of_nobody() -> None:
    check_singles(Triton())


def test_prompts_longer_than_a_piece() -> None:
    check_long_prompt(Triton())
