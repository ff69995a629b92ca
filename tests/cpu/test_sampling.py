"""Choosing tokens: every control against float64 formulas, the draw's distribution, and neighbours."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kit.sampling import Ask, error_names, make_rows
from trine.kernels.fused.base import Want
from trine.kernels.sampling.base import Choice, Chooser, Seen
from trine.kernels.sampling.native import Native
from trine.kernels.sampling.reference import Reference, noise, noise_key


@pytest.fixture(params=[Reference, Native])
def kernel(request: pytest.FixtureRequest) -> Chooser:
    if reason := request.param.cannot(Want("float32", "cpu", (0, 0))):
        pytest.skip(reason)
    return request.param()


def chosen(kernel: Chooser, logits: torch.Tensor, asks: list[Ask]) -> list[int]:
    choice = kernel.choose(logits, make_rows(asks))
    assert not choice.errors.any()
    return choice.tokens.tolist()


def shown(kernel: Chooser, logits: torch.Tensor, tokens: list[int], which: list[int], most: int) -> Seen:
    choice = Choice(torch.tensor([tokens, [0] * len(tokens)], dtype=torch.int32))
    return kernel.logprobs(logits, choice, which, most, make_rows([Ask()] * len(tokens)))


def edited(row: np.ndarray, a: Ask) -> np.ndarray:
    """What comes before temperature, in float64."""
    z = row.astype(np.float64)
    if a.allowed is not None:
        z[[i for i in range(len(z)) if i not in a.allowed]] = -np.inf
    if len(a.output) < a.min_tokens:
        z[list(a.stops)] = -np.inf
    for token, value in a.bias:
        z[token] += value
    for token in {*a.prompt, *a.output}:
        z[token] = (z[token] / a.repetition) if z[token] > 0 else z[token] * a.repetition
    for token, count in Counter(a.output).items():
        z[token] -= a.presence + a.frequency * count
    return z


def chances(row: np.ndarray, a: Ask) -> np.ndarray:
    """The distribution that is drawn from, in float64."""
    z = edited(row, a)
    z = (z - z.max()) / a.temperature
    keep = z >= (math.log(a.min_p) if a.min_p else -np.inf)
    if a.top_k:
        keep &= z >= np.sort(z)[-min(a.top_k, len(z))]
    p = np.where(keep, np.exp(z), 0)
    p /= p.sum()
    if a.top_p < 1:
        order = np.argsort(-p, kind="stable")
        last = order[np.searchsorted(np.cumsum(p[order]), a.top_p)]
        p = np.where(p >= p[last], p, 0)
    return p / p.sum()


def exponentials(seed: int, position: int, vocab: int) -> np.ndarray:
    """The noise again, in Python integers and float64."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        return x ^ x >> 31

    key = mix(mix(seed) + 0x9E3779B97F4A7C15 * (position + 1))
    low, high, word = key & 0xFFFFFFFF, key >> 32, 0xFFFFFFFF
    found = []
    for x in range(vocab):
        x ^= low
        x ^= x >> 16
        x = (x * 0x7FEB352D + high) & word
        x ^= x >> 15
        x = (x * 0x846CA68B) & word
        x ^= x >> 16
        found.append(-math.log1p(-((x & 0x7FFFFFFF) + 0.5) / 2**31))
    return np.array(found)


CASES = {
    "plain": Ask(),
    "hot": Ask(temperature=1.7),
    "cold": Ask(temperature=0.3),
    "frozen": Ask(temperature=1e-30),
    "frozen hard": Ask(temperature=1e-300),
    "top_k": Ask(top_k=7),
    "top_k of one": Ask(top_k=1),
    "top_k of more than there are": Ask(top_k=10_000),
    "top_p": Ask(top_p=0.8),
    "top_p of nothing": Ask(top_p=1e-9),
    "flat top_p": Ask(top_p=0.97, temperature=100.0),
    "min_p": Ask(min_p=0.05),
    "all filters": Ask(temperature=1.3, top_k=20, top_p=0.7, min_p=0.01),
    "repetition": Ask(repetition=1.8, output=(7, 7, 9)),
    "presence": Ask(presence=1.5, output=(7, 7, 9)),
    "frequency": Ask(frequency=-2.0, output=(7, 7, 7, 9)),
    "penalties": Ask(repetition=0.7, presence=-0.5, frequency=0.9, output=tuple(range(40))),
    "bias": Ask(bias=((4, 6.0), (8, -100.0))),
    "min_tokens": Ask(min_tokens=3, stops=(0, 1, 2), output=(4, 4)),
    "min_tokens are there": Ask(min_tokens=2, stops=(0, 1, 2), output=(4, 4)),
    "min_tokens are there, biased": Ask(
        min_tokens=2, stops=(0, 1, 2), output=(4, 4), bias=((0, 4.0), (1, 4.0), (2, 4.0))
    ),
    "allowed": Ask(allowed=(1, 2, 3, 4)),
    "allowed, biased": Ask(allowed=(1, 2, 3), bias=((9, 100.0), (2, 1.0)), repetition=1.2),
    "everything": Ask(
        0.8, 0.9, 0.01, 1.1, 0.2, 0.3, 30, 99, 4, (1, 2), (3, 3), (5,), ((6, 2.0),), tuple(range(50))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_controls_against_float64(kernel: Chooser, name: str) -> None:
    """The same noise and float64 formulas give the same token, but where two nearly tie."""
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(60, 97, generator=generator) * 3
    asks = [CASES[name]._replace(seed=CASES[name].seed + i // 2) for i in range(60)]
    got, compared = chosen(kernel, logits, asks), 0
    for row, ask, token in zip(logits.numpy(), asks, got, strict=True):
        p = chances(row, ask)
        assert p[token] > 0
        race = exponentials(ask.seed, len(ask.prompt) + len(ask.output), len(row)) / np.maximum(p, 1e-300)
        first, second = np.sort(race)[:2]
        if second > first * (1 + 1e-5):
            assert token == race.argmin()
            compared += 1
    assert compared > 55


@pytest.mark.parametrize("name", CASES)
def test_greedy_is_the_lowest_of_the_likeliest(kernel: Chooser, name: str) -> None:
    ask = CASES[name]._replace(temperature=0.0)
    logits = torch.randint(-4, 4, (40, 97), generator=torch.Generator().manual_seed(3)).float()
    for row, token in zip(logits.numpy(), chosen(kernel, logits, [ask] * 40), strict=True):
        z = edited(row, ask).astype(np.float32)
        near = np.isclose(z, z.max(), rtol=1e-6)
        assert near[token]
        if ask.repetition == 1 and not ask.frequency:  # no rounding in the way: ties are exact
            assert token == z.argmax()


@pytest.mark.parametrize("name", ["plain", "cold", "top_p", "all filters", "penalties"])
def test_distribution(kernel: Chooser, name: str) -> None:
    """Chi-square of 3,000 draws over positions and seeds."""
    ask, draws = CASES[name], 3000
    row = torch.randn(24, generator=torch.Generator().manual_seed(8)) * 1.5
    asks = [
        ask._replace(output=ask.output[:23], prompt=(3,) * (1 + i % 40), seed=i // 40) for i in range(draws)
    ]
    found = np.bincount(chosen(kernel, row.expand(draws, -1), asks), minlength=24)
    p = chances(row.numpy(), asks[0])
    assert not found[p == 0].any()
    likely = p * draws >= 5
    expected = np.append(p[likely], p[~likely].sum()) * draws
    counted = np.append(found[likely], found[~likely].sum())
    expected, counted = expected[expected > 0], counted[expected > 0]
    square, freedom = ((counted - expected) ** 2 / expected).sum(), len(expected) - 1
    assert square < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_noise_is_exponential_and_independent() -> None:
    """Moments over ids, and correlations between ids, positions and seeds."""
    ids = torch.arange(4096, dtype=torch.int32)
    table = torch.stack([noise(noise_key(s, p), ids) for s in range(8) for p in range(32)]).double().neg()
    assert table.min() > 0 and table.isfinite().all()
    n = table.numel()
    assert abs(table.mean() - 1) < 5 / math.sqrt(n)
    assert abs(table.var() - 1) < 5 * math.sqrt(8 / n)
    centred = (table - 1).reshape(8, 32, 4096)
    for shifted in (
        centred[:, :, 1:] * centred[:, :, :-1],
        centred[:, 1:] * centred[:, :-1],
        centred[1:] * centred[:-1],
        centred[:, :, 256:] * centred[:, :, :-256],
    ):
        assert abs(shifted.mean()) < 5 / math.sqrt(shifted.numel())
    bits = (table < math.log(2)).double().mean(0)  # each id is small half the time
    assert abs(bits - 0.5).max() < 6 * 0.5 / math.sqrt(256)
    assert noise_key(0, 1) != noise_key(1, 0) != noise_key(-1, 0) != noise_key(2**63 - 1, 0)


def test_noise_is_never_infinite_or_zero() -> None:
    """The ends of the range, found by running the hash backwards."""

    def before(x: int) -> int:
        x ^= x >> 16
        x = x * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
        x ^= x >> 15 ^ x >> 30
        x = x * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
        return x ^ x >> 16

    ends = np.array([before(0), before(0x7FFFFFFF)], dtype=np.uint32).view(np.int32)
    small, large = noise((0, 0), torch.from_numpy(ends)).neg().tolist()
    assert small == pytest.approx(2.0**-32, rel=1e-5)
    assert large == pytest.approx(23 * math.log(2), rel=1e-5)


def test_neighbours_change_nothing(kernel: Chooser) -> None:
    """Each row alone, in a mix, in reverse, and among poisoned rows: bit for bit."""
    generator = torch.Generator().manual_seed(5)
    asks = [a._replace(seed=s) for s in (1, 2, 3) for a in CASES.values()]
    asks += [a._replace(temperature=0.0) for a in CASES.values()]
    logits = torch.randn(len(asks), 997, generator=generator) * 4
    before = logits.clone()
    together = chosen(kernel, logits, asks)
    assert torch.equal(before, logits)
    assert together == [chosen(kernel, logits[i : i + 1], [a])[0] for i, a in enumerate(asks)]
    assert together == chosen(kernel, logits.flip(0), asks[::-1])[::-1]
    for most in (0, 5, 997):
        seen = shown(kernel, logits, together, list(range(len(asks))), most)
        for i, token in enumerate(together):
            alone = shown(kernel, logits[i : i + 1], [token], [0], most)
            assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, seen, strict=True))
    poisoned = torch.stack([logits, torch.full_like(logits, math.nan)], 1).reshape(-1, 997)
    choice = kernel.choose(poisoned, make_rows([a for a in asks for _ in (0, 1)]))
    assert choice.tokens[::2].tolist() == together and not choice.errors[::2].any()
    assert choice.errors[1::2].all()


def test_a_seed_repeats_and_differs(kernel: Chooser) -> None:
    row = torch.zeros(1, 500)
    first = [chosen(kernel, row, [Ask(seed=7, output=(1,) * i)])[0] for i in range(50)]
    assert first == [chosen(kernel, row, [Ask(seed=7, prompt=(9,) * (3 + i))])[0] for i in range(50)]
    assert first != [chosen(kernel, row, [Ask(seed=8, output=(1,) * i)])[0] for i in range(50)]
    assert len(set(first)) > 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers(kernel: Chooser, temperature: float) -> None:
    """They are never chosen; a row with nothing else says so, whatever is asked of it."""
    logits = torch.full((4, 9), math.nan)
    logits[0, 4] = -1e30
    logits[1] = torch.tensor([math.inf, 1, math.nan, -math.inf, 3, 2, 1, 1, 1])
    logits[3] = torch.arange(9)
    asks = [Ask(temperature, top_k=2)] * 3 + [Ask(temperature, allowed=(2, 3), stops=(2, 3), min_tokens=9)]
    choice = kernel.choose(logits, make_rows(asks))
    assert choice.tokens[0] == 4
    assert choice.tokens[1] in (4, 5)
    assert choice.tokens[2:].tolist() == [0, 0]
    assert error_names(choice) == [None, None, "no finite logit", "no token is allowed"]
    seen = shown(kernel, logits, [4, 4, 0, 8], [0, 1, 3], 3)
    assert (seen.chances[0, 0], seen.ids[0, 0]) == (0.0, 1)
    assert seen.ids[1].tolist() == [1, 4, 5, 1] and len(seen.ids) == 3


def test_logprobs_are_the_models_own(kernel: Chooser) -> None:
    logits = torch.randint(-3, 4, (20, 50), generator=torch.Generator().manual_seed(1)).float()
    tokens = list(range(20))
    seen = shown(kernel, logits, tokens, list(range(20)), 6)
    for i, (chances, ids) in enumerate(zip(seen.chances.tolist(), seen.ids.tolist(), strict=True)):
        row = logits[i].double().numpy()
        own = row - np.log(np.exp(row).sum())
        order = np.argsort(-row, kind="stable")  # of equals the lowest id first
        assert ids[1:] == order[:6].tolist()
        assert np.allclose(chances[1:], own[order[:6]], atol=1e-5)
        assert abs(chances[0] - own[tokens[i]]) < 1e-5
        assert order[ids[0] - 1] == tokens[i]


LARGEST = float(torch.finfo(torch.float32).max)
EXTREME = [0.0, 1.0, -1.0, 1e-38, -1e-45, 80.0, -80.0, 1e30, -1e30, LARGEST, -LARGEST]
NONE = [math.inf, -math.inf, math.nan]  # logits that count as never
UNIT = st.sampled_from([0.0, 1e-300, 1e-9, 0.5, 0.999999, 1.0])
PENALTY = st.sampled_from([-2.0, -1e-9, 0.0, 0.5, 2.0])
EXTREME_ASKS = st.builds(
    Ask,
    temperature=st.sampled_from([0.0, 5e-324, 1e-30, 0.7, 100.0]),
    top_p=UNIT.filter(bool),
    min_p=UNIT,
    repetition=st.sampled_from([0.01, 0.5, 1.0, 1.3, 100.0]),
    presence=PENALTY,
    frequency=PENALTY,
    top_k=st.sampled_from([0, 1, 3, 2**31 - 1]),
    seed=st.sampled_from([0, 1, -(2**63), 2**63 - 1]),
    min_tokens=st.sampled_from([0, 9]),
    prompt=st.just((0, 1, 1)),
    output=st.sampled_from([(), (2,), (2, 2, 3, 4, 5, 6, 7)]),
    stops=st.sampled_from([(), (0, 7), tuple(range(8))]),
    bias=st.sampled_from([(), ((1, 100.0), (2, -100.0))]),
    allowed=st.sampled_from([None, (0,), (2, 5), tuple(range(8))]),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(EXTREME + NONE), min_size=8, max_size=8), EXTREME_ASKS)
@example([LARGEST] * 8, Ask(repetition=0.01, top_p=0.5, prompt=(1, 2)))
@example([-LARGEST] * 8, Ask(repetition=100.0, top_p=0.5, prompt=tuple(range(8))))
@example([LARGEST, *[1.0] * 7], Ask(temperature=0.0, repetition=0.01, prompt=(1, 2)))
def test_whatever_logits_and_penalties_are_what_may_be_chosen_is_chosen(row: list[float], ask: Ask) -> None:
    """An edit that leaves float32 is as large as float32 is: it neither fails, nor forbids, nor takes all others'
    chances away."""
    logits = torch.tensor([row])
    choice = Reference().choose(logits, make_rows([ask]))
    finite = {i for i, logit in enumerate(row) if math.isfinite(logit)}
    able = finite & set(range(8) if ask.allowed is None else ask.allowed)
    if ask.early:
        able -= set(ask.stops)
    error, token = error_names(choice)[0], choice.tokens.item()
    assert (error is None) == bool(able), (error, able)
    if not able:
        return
    assert token in able
    z = np.clip(edited(np.array(row), ask), -LARGEST, LARGEST)
    best = max(z[i] for i in able)
    if ask.temperature < 1e-20 or ask.top_k == 1:
        assert z[token] >= best - 1e-6 * abs(best) - 1e-25
