"""Sampling by the native library against plain torch: the same ids, errors and logprobs."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.cpu.test_sampling import CASES
from tests.kit.sampling import Ask, make_rows
from trine.kernels.fused.base import Want
from trine.kernels.sampling.base import Choice
from trine.kernels.sampling.native import DEEP, Native
from trine.kernels.sampling.reference import Reference

EXPECTED = Reference()


@pytest.fixture(scope="module")
def kernel() -> Native:
    if reason := Native.cannot(Want("float32", "cpu", (0, 0))):
        pytest.skip(reason)
    return Native()


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def check(kernel: Native, logits: torch.Tensor, asks: list[Ask]) -> torch.Tensor:
    rows = make_rows(asks)
    before = logits.clone()
    found = kernel.choose(logits, rows).said
    assert torch.equal(logits.isnan(), before.isnan()) and torch.equal(
        logits.nan_to_num(), before.nan_to_num()
    )
    assert torch.equal(found, EXPECTED.choose(logits, rows).said)
    return found[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_every_control(kernel: Native, name: str, scale: float) -> None:
    asks = [CASES[name]._replace(seed=31 * i - 5) for i in range(12)] + [
        CASES[name]._replace(temperature=0.0)
    ]
    check(kernel, random_logits(len(asks), 5003, len(name), scale), asks)


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 63, 64, 65, 127, 1023, 1024, 1025, 2111])
def test_odd_vocabularies(kernel: Native, vocab: int) -> None:
    asks = [
        Ask(0.0),
        Ask(),
        Ask(top_k=3),
        Ask(top_k=40),
        Ask(top_p=0.6),
        Ask(0.0, repetition=1.5, prompt=(0,)),
    ]
    check(kernel, random_logits(6, vocab, vocab), asks)
    equal = torch.randint(-4, 4, (6, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    check(kernel, equal, asks)
    seen = [Choice(torch.tensor([[vocab - 1] * 6, [0] * 6], dtype=torch.int32))] * 2
    for most in {0, 1, min(vocab, 5), vocab}:
        a, b = (
            k.logprobs(equal, c, [4, 0], most, make_rows(asks))
            for k, c in zip((kernel, EXPECTED), seen, strict=True)
        )
        assert torch.equal(a.ids, b.ids)
        torch.testing.assert_close(a.chances, b.chances, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3])
def test_the_noise_is_the_same(kernel: Native, scale: float) -> None:
    """Nearly all is luck where all are nearly equal: ids are those of the same hash."""
    asks = [Ask(seed=s, prompt=(1,) * p) for s in (0, 5, -3, 2**63 - 1, -(2**63)) for p in (1, 2, 77, 4000)]
    ids = check(kernel, random_logits(len(asks), 3000, 4, scale), asks)
    assert len(ids.unique()) > len(asks) // 2


@pytest.mark.parametrize("top_k", [1, 2, 40, 100, 800, 4999])
def test_any_top_k(kernel: Native, top_k: int) -> None:
    asks = [Ask(top_k=top_k, seed=i, top_p=1.0 if i % 2 else 0.9) for i in range(8)]
    check(kernel, random_logits(8, 5000, top_k), asks)


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.99, 0.99999])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 9.0, 1e9])
def test_any_top_p(kernel: Native, top_p: float, temperature: float) -> None:
    asks = [Ask(temperature, top_p, seed=i) for i in range(8)]
    check(kernel, random_logits(8, 5000, 3), asks)


def test_what_is_not_a_number(kernel: Native) -> None:
    logits = random_logits(7, 300, 2)
    logits[:, ::5] = math.nan
    logits[1, 3] = logits[4, 299] = math.inf
    logits[2, 4:] = -math.inf
    logits[3] = math.nan
    logits[5] = -math.inf
    asks = [Ask(), Ask(top_k=9), Ask(top_p=0.8), Ask(), Ask(0.0), Ask(), Ask(0.7, allowed=(0, 5))]
    for each in (asks, [ask._replace(temperature=0.0) for ask in asks]):
        check(kernel, logits, each)
    choice = Choice(torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0] * 7], dtype=torch.int32))
    for most in (0, 6, 300):
        a, b = (
            k.logprobs(logits, choice, [0, 1, 2, 4, 6], most, make_rows(asks)) for k in (kernel, EXPECTED)
        )
        assert torch.equal(a.ids, b.ids)
        torch.testing.assert_close(a.chances, b.chances, atol=1e-5, rtol=0)


def test_nothing_is_allowed(kernel: Native) -> None:
    asks = [Ask(allowed=()), Ask(0.0, allowed=()), Ask(0.0, allowed=(4,)), Ask(0.0)]
    assert check(kernel, random_logits(4, 20, 1), asks)[2] == 4


def test_rows_in_any_layout(kernel: Native) -> None:
    wide = random_logits(6, 400, 9)
    for logits in (wide[::2, :200], wide[:3, ::2], wide[:1, :200].expand(3, -1), wide[:3].double()):
        check(kernel, logits, [Ask(0.0), Ask(seed=4), Ask(top_k=5)])


def test_choices_of_the_same_rows_hold_for_a_while(kernel: Native) -> None:
    rows = make_rows([Ask(0.0)])
    logits = [torch.eye(DEEP)[i : i + 1] for i in range(DEEP)]
    choices = [kernel.choose(each, rows) for each in logits]
    assert [c.tokens.item() for c in choices] == list(range(DEEP))


def test_what_is_asked_follows_the_table(kernel: Native) -> None:
    """The same rows a step later: a position more, and another token that counts."""
    rows = make_rows([Ask(seed=3), Ask(0.0, presence=100.0), Ask(0.0, min_tokens=1, stops=(7,))])
    logits = torch.zeros(3, 50)
    logits[:, 7] = 9.0
    for _ in range(2):
        found, expected = (k.choose(logits, rows).said.clone() for k in (kernel, EXPECTED))
        assert torch.equal(found, expected)
        assert found[0, 1:].tolist() == ([7, 0] if rows.state.known[1] == 3 else [0, 7])
        rows.state.tokens[1:, 3] = 7
        rows.state.known[1:] += 1


def test_extremes(kernel: Native) -> None:
    """Logits and settings at the ends of their ranges, in any mix: edits stay finite, and nobody fails."""
    rng, largest = random.Random(5), torch.finfo(torch.float32).max
    values = [
        0.0,
        1.0,
        -1.0,
        1e-38,
        -1e-45,
        80.0,
        -80.0,
        1e30,
        -1e30,
        largest,
        -largest,
        math.inf,
        -math.inf,
        math.nan,
    ]
    for _ in range(40):
        asks = [
            Ask(
                temperature=rng.choice([0.0, 5e-324, 1e-30, 0.7, 100.0]),
                top_p=rng.choice([1.0, 1e-300, 1e-9, 0.5, 0.999999]),
                min_p=rng.choice([0.0, 1e-300, 0.5, 1.0]),
                repetition=rng.choice([0.01, 1.0, 1.3, 100.0]),
                presence=rng.choice([-2.0, 0.0, 2.0]),
                frequency=rng.choice([-2.0, 0.0, 0.5]),
                top_k=rng.choice([0, 1, 3, 2**31 - 1]),
                seed=rng.choice([0, 1, -(2**63), 2**63 - 1]),
                min_tokens=rng.choice([0, 9]),
                output=rng.choice([(), (2,), (2, 2, 3, 4, 5, 6, 7)]),
                stops=rng.choice([(), (0, 7), tuple(range(8))]),
                bias=rng.choice([(), ((1, 100.0), (2, -100.0))]),
                allowed=rng.choice([None, None, (0,), (2, 5)]),
            )
            for _ in range(20)
        ]
        check(kernel, torch.tensor([[rng.choice(values) for _ in range(8)] for _ in asks]), asks)
