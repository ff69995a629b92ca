"""Choosing tokens in plain torch: the CPU path, and what every other backend is compared to.

Greedy rows without edits share one argmax. Every other row is worked on alone, over tensors
whose shapes depend on that row only: on a CPU a row of logits fits in the core's own cache,
and a neighbour cannot change a bit of it.

The draw is a race of exponentials: token i arrives at E_i / p_i, the first one wins, which
is Gumbel-max with one logarithm less and chooses i with probability p_i. E_i is a hash of
(seed, position, i), so a draw needs no state, no order, and no normalised probabilities.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import ERRORS, Ask, Choice, Rows, Seen

WIDTHS = (8.0, 16.0, math.inf)  # nats below the likeliest: how far top_p looks before it sorts more

LARGEST = torch.finfo(torch.float32).max  # what an edited logit grows to at most, upwards and downwards
COLDEST = 1e-30  # float32 would make less a zero; any gap of two logits is vast at this one already


class Numbers(NamedTuple):
    """One row's numbers: REALS and WHOLES in their order, and its place."""

    temperature: float
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    top_k: int
    seed: int
    min_tokens: int
    position: int
    prompt: int

    @property
    def early(self) -> bool:
        """Too early to end."""
        return self.position - self.prompt < self.min_tokens


class Reference:
    """Plain torch, row by row."""

    name = "reference"
    order = 100

    @classmethod
    def cannot(cls, want: Any) -> str | None:
        return None if want.device == "cpu" else f"is for a CPU, not {want.device}"

    def __init__(self, want: Any = None) -> None: ...

    def choose(self, logits: Tensor, rows: Rows) -> Choice:
        finite = logits.amax(dim=-1).isfinite().tolist()  # one NaN or infinity shows here
        state, slots = rows.state, rows.slots
        places = zip(state.known[slots].tolist(), state.prompt[slots].tolist(), strict=True)
        errors = [0] * len(finite)
        tokens = [-1] * len(finite)
        for i, (ask, place) in enumerate(zip(rows.asks, places, strict=True)):
            numbers = Numbers._make((*ask.reals, *ask.wholes, *place))
            edits = ask.penalties or ask.bias is not None or i in rows.allowed or numbers.early
            if not ask.draws and finite[i] and not edits:
                continue
            row = logits[i] if finite[i] else _finite(logits[i])
            if edits:
                row = _edited(row, numbers, ask, rows, i)
            top = row.max()
            if top.item() == -math.inf:
                tokens[i], errors[i] = (
                    0,
                    ERRORS.index("no token is allowed" if finite[i] else "no finite logit"),
                )
            elif not ask.draws:
                tokens[i] = int(row.argmax())
            else:
                tokens[i] = int(_drawn(row - top, numbers))
        plain = [i for i, token in enumerate(tokens) if token < 0]
        if plain:
            best = logits.argmax(dim=-1).tolist()  # of equal logits the lowest id
            for i in plain:
                tokens[i] = best[i]
        return Choice(torch.tensor([tokens, errors], dtype=torch.int32))

    def logprobs(self, logits: Tensor, choice: Choice, which: list[int], most: int, rows: Rows) -> Seen:
        tokens = choice.tokens.tolist()
        seen = [_seen(logits[i], tokens[i], most) for i in which]
        return Seen(torch.stack([s.chances for s in seen]), torch.stack([s.ids for s in seen]))


PLUGIN = Reference


def _finite(row: Tensor) -> Tensor:
    """What is not a finite number is never chosen."""
    return torch.where(row.isfinite(), row, -math.inf)


def _edited(row: Tensor, numbers: Numbers, ask: Ask, rows: Rows, i: int) -> Tensor:
    """A copy of the row with everything done to it that comes before temperature. No edit makes a logit infinite."""
    if i in rows.allowed:
        allowed = torch.from_numpy(rows.allowed[i])
        row = torch.full_like(row, -math.inf).index_copy_(0, allowed, row[allowed])
    else:
        row = row.clone()
    if numbers.early:
        row[torch.from_numpy(ask.stops)] = -math.inf
    if ask.bias is not None:
        ids, values = torch.from_numpy(ask.bias[0]), torch.from_numpy(ask.bias[1])
        row[ids] = _bounded(row[ids] + values, row[ids])
    if not ask.penalties:
        return row
    tokens = rows.state.tokens[rows.slots[i], : numbers.position].long()
    if numbers.repetition != 1.0:
        seen = tokens.unique()
        old = row[seen]
        row[seen] = _bounded(torch.where(old > 0, old / numbers.repetition, old * numbers.repetition), old)
    if numbers.presence or numbers.frequency:
        output, counts = tokens[numbers.prompt :].unique(return_counts=True)
        old = row[output]
        row[output] = _bounded(old - (counts * numbers.frequency + numbers.presence), old)
    return row


def _bounded(new: Tensor, old: Tensor) -> Tensor:
    """Edited logits, finite: an infinite one has no chance that can be computed. What was never stays never."""
    return torch.where(old == -math.inf, old, new.clamp_(-LARGEST, LARGEST))


def _drawn(row: Tensor, ask: Numbers) -> Tensor:
    """Draw from logits [vocab] whose largest is 0, which no temperature can overflow."""
    row = row.div_(max(ask.temperature, COLDEST))
    cut = _cut(row, ask.top_k, ask.top_p, ask.min_p)
    key = noise_key(ask.seed, ask.position)
    if cut == -math.inf:
        ids = torch.arange(len(row), dtype=torch.int32, device=row.device)
        return row.exp_().div_(noise(key, ids)).argmin()
    kept = (row >= cut).nonzero().squeeze(1)
    return kept[row[kept].exp_().div_(noise(key, kept.int())).argmin()]


def _cut(row: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit that stays. Logits equal to it stay too, so no order of equals matters."""
    cut = math.log(min_p) if min_p > 0.0 else -math.inf
    if 0 < top_k < len(row):
        cut = max(cut, row.topk(top_k, sorted=True).values[-1].item())
    return _nucleus(row, cut, top_p) if top_p < 1.0 else cut


def _nucleus(row: Tensor, cut: float, top_p: float) -> float:
    """The cut that keeps `top_p` of the probability above `cut`.

    Only the likeliest few have to be sorted, nearly always: sums run from the likeliest down,
    so how far it looked does not change them."""
    if cut > -math.inf:
        row = row[row >= cut]
    need = top_p * row.exp().sum(dtype=torch.float64)
    for width in WIDTHS:
        near = row[row >= -width].sort(descending=True).values
        sums = near.exp().cumsum(0, dtype=torch.float64)
        if sums[-1] >= need:
            return near[torch.searchsorted(sums, need)].item()
    return cut  # the sums differ in their last bits: everything is needed


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit words for one position of one seed.

    splitmix64's finalizer (Steele, Lea and Flood, 2014), once over the seed and once over both."""
    mixed = _mix(_mix(seed) + 0x9E3779B97F4A7C15 * (position + 1))
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def noise(key: tuple[int, int], ids: Tensor) -> Tensor:
    """Minus an exponential variate for each id: [n] int32 -> [n] float32, never 0 or infinite.

    A 32-bit mixing hash with the constants of lowbias32 (C. Wellons, hash-prospector), the
    second half of the key added between its rounds. Shifts of torch keep the sign: hence the masks."""
    x = ids ^ key[0]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x += key[1]
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    # uniform in (0, 1): small ones, which decide, are exact; the largest rounds to just below 1
    return x.float().add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-23)).log1p_()


def _mix(x: int) -> int:
    x &= 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _seen(row: Tensor, token: int, most: int) -> Seen:
    """Of one row. Equal logits are ranked by id, as greedy chooses among them."""
    row = _finite(row)
    chances = row.log_softmax(dim=0)
    own = row[token]
    rank = 1 + int((row > own).sum() + (row[:token] == own).sum())
    if most == 0:
        return Seen(chances[token : token + 1], torch.tensor([rank], dtype=torch.int32))
    near = (row >= row.topk(most).values[-1]).nonzero().squeeze(1)  # by id
    ids = near[row[near].sort(descending=True, stable=True).indices[:most]]
    chances = torch.cat((chances[token : token + 1], chances[ids]))
    return Seen(chances, torch.cat((torch.tensor([rank]), ids)).int())
