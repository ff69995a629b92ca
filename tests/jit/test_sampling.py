"""Sampling in Triton, under the interpreter, against the reference: the same ids, errors and logprobs."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit.sampling import Ask, make_rows
from trine.kernels.sampling.base import Choice
from trine.kernels.sampling.reference import Reference, noise, noise_key

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from trine.kernels.jit import sampling  # noqa: E402
from trine.kernels.sampling.triton import Triton  # noqa: E402

KERNEL = Triton()
KERNEL.chunk, KERNEL.wide = 64, 128  # an interpreter takes its time

VOCAB = 150  # three chunks, the last one short


@triton.jit
def fill(SEEDS, IDS, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    seed, position = tl.load(SEEDS), tl.load(SEEDS + 1).to(tl.int32)
    tl.store(OUT + i, sampling.noise(seed, position, tl.load(IDS + i)))


CASES = {
    "greedy": Ask(0.0),
    "plain": Ask(),
    "hot": Ask(1.7),
    "cold": Ask(0.3),
    "frozen": Ask(1e-300),
    "top_k": Ask(top_k=7),
    "top_k of one": Ask(top_k=1),
    "top_k of more than there are": Ask(top_k=10_000),
    "top_p": Ask(top_p=0.8),
    "top_p of nothing": Ask(top_p=1e-9),
    "flat top_p": Ask(top_p=0.97, temperature=100.0),
    "min_p": Ask(min_p=0.05),
    "all filters": Ask(temperature=1.3, top_k=20, top_p=0.7, min_p=0.01),
    "cold filters": Ask(temperature=0.02, top_k=20, top_p=0.9),
    "repetition": Ask(repetition=1.8, output=(7, 7, 9)),
    "presence": Ask(presence=1.5, output=(7, 7, 129)),
    "frequency": Ask(frequency=-2.0, output=(7, 7, 7, 129)),
    "penalties": Ask(repetition=0.7, presence=-0.5, frequency=0.9, output=tuple(range(40))),
    "bias": Ask(bias=((4, 6.0), (128, -100.0))),
    "min_tokens": Ask(min_tokens=3, stops=(0, 1, 2), output=(4, 4)),
    "min_tokens are there": Ask(min_tokens=2, stops=(0, 1, 2), output=(4, 4)),
    "allowed": Ask(allowed=(1, 2, 3, 144)),
    "allowed, biased": Ask(allowed=(1, 2, 3), bias=((9, 100.0), (2, 1.0)), repetition=1.2),
    "everything": Ask(
        0.8, 0.9, 0.01, 1.1, 0.2, 0.3, 30, 99, 4, (1, 2), (3, 3), (5,), ((6, 2.0),), tuple(range(0, 150, 3))
    ),
}


MIXED = (
    "greedy",
    "plain",
    "frozen",
    "top_k",
    "all filters",
    "penalties",
    "bias",
    "min_tokens",
    "allowed",
    "everything",
)


def mixed() -> list[Ask]:
    asks = [CASES[name]._replace(seed=31 * i - 5) for i, name in enumerate(MIXED)]
    return asks + [ask._replace(temperature=0.0) for ask in asks if ask.repetition != 1]


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.randn(len(mixed()), VOCAB, generator=torch.Generator().manual_seed(7)) * 3


def test_noise_is_the_references() -> None:
    ids = torch.arange(4096, dtype=torch.int32) * 37
    for seed, position in ((0, 0), (5, 77), (-3, 131071), (2**63 - 1, 9), (-(2**63), 1)):
        out = torch.empty(4096)
        fill[(1,)](torch.tensor([seed, position]), ids, out, 4096)
        expected = -noise(noise_key(seed, position), ids)
        torch.testing.assert_close(out, expected, rtol=4e-7, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_every_control_alone(name: str) -> None:
    rows = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(len(name))) * 3
    asks = [CASES[name]._replace(seed=s) for s in (1, 2)] + [CASES[name]._replace(temperature=0.0)]
    expected = Reference().choose(rows, make_rows(asks))
    assert torch.equal(KERNEL.choose(rows, make_rows(asks)).said, expected.said)


@pytest.mark.parametrize("name", ["top_k", "top_p", "all filters"])
def test_a_cut_that_is_not_where_it_was_looked_for(name: str) -> None:
    """No room for what is collected: the whole row is searched."""
    rows = torch.randint(-8, 9, (2, 70), generator=torch.Generator().manual_seed(2)).float()
    asks, crowded = [CASES[name], CASES[name]._replace(seed=3)], Triton()
    crowded.chunk, crowded.wide, crowded.room = 64, 128, 2
    expected = Reference().choose(rows, make_rows(asks))
    assert torch.equal(crowded.choose(rows, make_rows(asks)).said, expected.said)


def test_a_mix_of_all(logits: torch.Tensor) -> None:
    asks, before = mixed(), logits.clone()
    found = KERNEL.choose(logits, make_rows(asks))
    assert torch.equal(found.said, Reference().choose(logits, make_rows(asks)).said)
    assert torch.equal(before, logits)
    back = KERNEL.choose(logits.flip(0)[::3], make_rows(asks[::-3]))
    assert torch.equal(back.said, found.said.flip(1)[:, ::3])


@pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65])
def test_odd_vocabularies(vocab: int) -> None:
    rows = torch.randint(-4, 4, (5, vocab), generator=torch.Generator().manual_seed(3)).float()
    asks = [Ask(0.0), Ask(), Ask(top_k=3), Ask(top_p=0.6), Ask(0.0, repetition=1.5, prompt=(0,))]
    expected = Reference().choose(rows, make_rows(asks))
    assert torch.equal(KERNEL.choose(rows, make_rows(asks)).said, expected.said)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers(temperature: float) -> None:
    logits = torch.full((5, 9), math.nan)
    logits[0, 4] = -1e30
    logits[1] = torch.tensor([math.inf, 1, math.nan, -math.inf, 3, 2, 1, 1, 1])
    logits[3] = torch.arange(9)
    logits[4] = torch.tensor([1.0, 1, math.nan, -math.inf, 1, 1, 1, 1, 1])
    asks = [Ask(temperature, top_k=2)] * 3
    asks += [Ask(temperature, allowed=(2, 3), stops=(2, 3), min_tokens=9)]
    asks += [Ask(temperature, allowed=(2, 3))]
    expected = Reference().choose(logits, make_rows(asks))
    assert expected.errors.tolist() == [0, 0, 2, 1, 2]
    assert torch.equal(KERNEL.choose(logits, make_rows(asks)).said, expected.said)


@pytest.mark.parametrize("most", [0, 1, 20])
def test_logprobs(most: int) -> None:
    logits = torch.randint(-3, 4, (6, VOCAB), generator=torch.Generator().manual_seed(1)).float()
    logits[2] = torch.randn(VOCAB)
    choice = Choice(torch.tensor([[0, 5, 149, 64, 7, 8], [0] * 6], dtype=torch.int32))
    rows = make_rows([Ask()] * 6)
    which = [1, 2, 3, 5]
    expected = Reference().logprobs(logits, choice, which, most, rows)
    found = KERNEL.logprobs(logits, choice, which, most, rows)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.chances, expected.chances, atol=1e-5, rtol=0)


def test_many_draws() -> None:
    """The same ids as the reference, whose distribution is tested elsewhere."""
    row = torch.randn(24, generator=torch.Generator().manual_seed(8)) * 1.5
    for ask, count in ((Ask(0.9), 24), (Ask(top_p=0.8), 12)):
        asks = [ask._replace(prompt=(3,) * (1 + i % 40), seed=i // 40) for i in range(count)]
        found = KERNEL.choose(row.expand(count, -1), make_rows(asks)).tokens
        assert torch.equal(found, Reference().choose(row.expand(count, -1), make_rows(asks)).tokens)
        assert len(found.unique()) >= 5
