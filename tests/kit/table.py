"""Random orders and steps for two tables that have to stay the same, bit for bit."""

from __future__ import annotations

import random
from array import array

import torch

from trine.core.types import Batch, Grant, Join, Row, Sampling, Write
from trine.kernels.table.base import Keeper
from trine.runtime.table import Table

CPU = torch.device("cpu")


def tables(kernel: Keeper, slots: int = 6, max_len: int = 40) -> tuple[Table, Table]:
    """Of the reference, and of `kernel`."""
    return Table(slots, max_len, 4, 2, CPU), Table(slots, max_len, 4, 2, CPU, kernel)


def random_batch(rng: random.Random, step: int, length: dict[int, int], most: int) -> Batch:
    """Joins, grants over them, and writes behind them; `length` is kept by slot."""
    batch = Batch(step, [])
    for slot in rng.sample(range(1, 6), rng.randint(0, 2)):
        length[slot] = rng.randint(2, most // 2)
        ids = array("i", [rng.randrange(1000) for _ in range(length[slot])]).tobytes()
        pages = [[rng.randrange(1, 99) for _ in range(rng.randint(0, 6))] for _ in (0, 1)]
        sampling = Sampling(rng.random(), rng.random(), rng.randrange(9), seed=rng.randrange(2**70))
        batch.joins.append(Join(slot, ids, length[slot], pages, rng.randrange(length[slot]), sampling))
    for _ in range(rng.randint(0, 4) if length else 0):
        first = rng.randrange(8)
        pages = [rng.randrange(1, 99) for _ in range(rng.randint(1, 10 - first))]
        batch.grants.append(Grant(rng.choice(list(length)), rng.randrange(2), first, pages))
    for _ in range(rng.randint(0, 2) if length else 0):
        slot = rng.choice(list(length))
        if length[slot] + 3 <= most:
            batch.writes.append(Write(slot, [rng.randrange(1000) for _ in range(rng.randint(1, 3))]))
            length[slot] += len(batch.writes[-1].tokens)
    return batch


def check_random_orders(kernel: Keeper, steps: int = 40, seed: int = 3) -> None:
    """Orders, ragged steps, and tokens behind them."""
    rng = random.Random(seed)
    one, two = tables(kernel)
    length: dict[int, int] = {}
    for number in range(steps):
        batch = random_batch(rng, number, length, 36)
        for t in (one, two):
            t.apply(batch)
        assert torch.equal(one.state.arena, two.state.arena)
        left = {s: n - one.reach[s] for s, n in length.items() if n > one.reach[s]}
        rows = [Row(s, rng.randint(1, n), rng.random() < 0.7) for s, n in left.items() if rng.random() < 0.6]
        if not rows:
            continue
        rows.sort(key=lambda row: row.count > 1)
        for a, b in zip(*(t.gather(rows) for t in (one, two)), strict=True):
            if isinstance(a, list):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            else:
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        sampled = [row.slot for row in rows if one.reach[row.slot] == length[row.slot] < 36]
        for t in (one, two):
            t.append(t.slots(sampled, 5), torch.arange(5) + number)
            t.grown(sampled)
        for slot in sampled:
            length[slot] += 1
        assert torch.equal(one.state.arena, two.state.arena)


def check_singles(kernel: Keeper) -> None:
    """With rows of nobody."""
    one, two = tables(kernel)
    for t in (one, two):
        joins = [
            Join(
                s,
                array("i", range(10 * s, 10 * s + 9)).tobytes(),
                9,
                [[s, 8, 7], [9, s, s]],
                s,
                Sampling(seed=1),
            )
            for s in (1, 3, 4)
        ]
        t.apply(Batch(1, [], joins=joins))
    for count in (4, 70):
        a, b = (t.singles(t.slots([3, 1], count)) for t in (one, two))
        assert torch.equal(a.ids, b.ids) and torch.equal(a.positions, b.positions)
        assert torch.equal(a.lengths, b.lengths)
        assert all(torch.equal(x, y) for x, y in zip(a.write, b.write, strict=True))
        assert torch.equal(one.state.arena, two.state.arena)


def check_long_prompt(kernel: Keeper) -> None:
    """One that is longer than a piece."""
    one, two = tables(kernel, 3, 3000)
    ids = array("i", range(2500)).tobytes()
    batch = Batch(
        1, [], [Join(2, ids, 2500, [list(range(625)), [3]], 0, Sampling(seed=1))], writes=[Write(2, [7])]
    )
    for t in (one, two):
        t.apply(batch)
    assert torch.equal(one.state.arena, two.state.arena)
