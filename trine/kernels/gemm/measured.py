"""Products by the fastest of the library's ways, chosen by measurement for each size and number of rows.

The first way that the library names is often not its best (products of an 8B model, H200, of what torch takes and
the best: 5.03 and 4.72 ms at 128 rows, 4.47 and 4.35 at 50). Choices are made when `settle` is called, which waits
for the device, and at no other time; a choice stays for the life of the object. Without one the product is left to
the caller. As they are measured, two starts may choose otherwise, and then differ in the last bits of a result;
sums are in float32 in any case. It does not know how the usual product is done, or which layer asks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from trine.errors import Unsupported
from trine.registry import get

from . import choice
from .base import Want
from .lt import ALIGNED, Lt, Sizes, Way, load, suits

log = logging.getLogger(__name__)

Usual = Callable[[Tensor, Tensor, bool], Tensor]  # x, weight, wide


class Measured:
    """`lt` multiplies; `platform` has events and the stream (platforms.cuda).

    `on`: whether choices are used. Turned off, all is left to the caller; choices stay."""

    def __init__(self, lt: Lt, platform: Any) -> None:
        self.lt, self.platform, self.on = lt, platform, True
        self.known: dict[tuple[int, int, int, bool], Way | None] = {}  # by Sizes; None: the usual
        self.weights: dict[tuple[int, int, bool], list[Tensor]] = {}  # some of those met: outs, ins, wide
        self.met: set[tuple[int, bool]] = set()  # addresses of weights, wide
        self.seconds = 0.0  # that settling took in all

    def multiply(self, x: Tensor, weight: Tensor, wide: bool) -> Tensor | None:
        """[rows, ins] -> [rows, outs]; None: nothing better than the usual is known for these sizes."""
        if x.shape[0] > choice.MOST:
            return None
        if (weight.data_ptr(), wide) not in self.met:
            self._meet(weight, wide)
        outs, ins = weight.shape
        sizes = Sizes(x.shape[0], outs, ins, wide)
        way = self.known.get(sizes) if self.on else None
        if way is None or x.dtype != weight.dtype or not x.is_contiguous() or x.data_ptr() % ALIGNED:
            return None
        try:
            return self._run(way, wide, x, weight)
        except Unsupported:
            self.known[sizes] = None
            return None

    def settle(self, rows: int, usual: Usual) -> None:
        """Choose for all weights met so far, if not done yet. It waits for the device.

        Some 50 ms for an 8B model (estimated): for each of its five sizes of weights up to 8 ways and the usual are
        run 8 times, the best ones three times that."""
        if not choice.LEAST <= rows <= choice.MOST:
            return
        start = time.perf_counter()
        for (outs, ins, wide), weights in self.weights.items():
            sizes = Sizes(rows, outs, ins, wide)
            if sizes not in self.known:
                self.known[sizes] = self._choose(sizes, weights, usual)
        self.seconds += time.perf_counter() - start

    def _meet(self, weight: Tensor, wide: bool) -> None:
        """Weights of as many layers are kept as it takes to measure without a cache's help."""
        self.met.add((weight.data_ptr(), wide))
        outs, ins = weight.shape
        if outs * ins < choice.LITTLE_TO_GAIN or not suits(weight):
            return
        kept = self.weights.setdefault((outs, ins, wide), [])
        if len(kept) < choice.LAYERS and sum(map(_bytes, kept)) < choice.UNCACHED:
            kept.append(weight)

    def _choose(self, sizes: Sizes, weights: list[Tensor], usual: Usual) -> Way | None:
        """The fastest way; None if the usual is as fast, or a way cannot be found."""
        weight = weights[0]
        chance = torch.Generator(weight.device).manual_seed(sizes.rows)
        x = torch.randn(
            sizes.rows, sizes.ins, generator=chance, device=weight.device, dtype=torch.float32
        ).to(weight.dtype)
        try:
            ways = self.lt.ways(sizes, choice.WAYS)
            true = _sample(usual(x, weight, sizes.wide))
            ways = [way for way in ways if self._works(way, sizes.wide, x, weight, true)]
            return self._fastest(sizes, ways, x, weights, usual) if ways else None
        except (Unsupported, torch.OutOfMemoryError):
            return None

    def _works(self, way: Way, wide: bool, x: Tensor, weight: Tensor, true: Tensor) -> bool:
        """Whether it gives the same numbers, but for rounding. The first run is also the one that loads its code."""
        try:
            found = _sample(self._run(way, wide, x, weight))
        except Unsupported:
            return False
        return bool((found - true).norm() <= choice.CLOSE * true.norm())

    def _fastest(
        self, sizes: Sizes, ways: list[Way], x: Tensor, weights: list[Tensor], usual: Usual
    ) -> Way | None:
        """All are measured once, the best ones and the usual twice more; of each the shortest counts."""
        least = choice.TURNS if _bytes(weights[0]) < choice.UNCACHED else choice.FEW_TURNS
        turns = list(islice(cycle(weights), max(len(weights), least)))
        calls: list[Callable[[Tensor], Any]] = [lambda weight: usual(x, weight, sizes.wide)]
        calls += [partial(self._run, way, sizes.wide, x) for way in ways]
        seconds = self._seconds(calls, turns)
        order = sorted(range(1, len(calls)), key=seconds.__getitem__)
        final = [0, *order[: choice.FINALISTS]]
        for _ in range(choice.ROUNDS):
            again = self._seconds([calls[i] for i in final], turns)
            for i, found in zip(final, again, strict=True):
                seconds[i] = min(seconds[i], found)
        best = min(final, key=seconds.__getitem__)
        gains = best > 0 and seconds[best] < choice.BETTER * seconds[0]
        log.debug(
            "%s: %s of %d ways, %.1f us instead of %.1f",
            *(sizes, f"#{best}" if gains else "none", len(ways), seconds[best] * 1e6, seconds[0] * 1e6),
        )
        return ways[best - 1] if gains else None

    def _seconds(self, calls: list[Callable[[Tensor], Any]], turns: list[Tensor]) -> list[float]:
        """What each call takes the device for one weight."""
        spans = []
        for call in calls:
            first, last = self.platform.event(), self.platform.event()
            # What is ordered meanwhile then runs without gaps, as in a graph.
            self.platform.occupy(choice.HOLD)
            first.record()
            for weight in turns:
                call(weight)
            last.record()
            spans.append((first, last))
        spans[-1][1].wait()
        return [last.since(first) / len(turns) for first, last in spans]

    def _run(self, way: Way, wide: bool, x: Tensor, weight: Tensor) -> Tensor:
        y = x.new_empty(len(x), len(weight), dtype=torch.float32 if wide else x.dtype)
        self.lt.multiply(way, x, weight, y, self.platform.stream_address())
        return y


def measured(want: Want) -> tuple[Measured | None, str]:
    """For these weights on the current device; or None, and why."""
    if want.device != "cuda":
        return None, f"cuBLASLt is for CUDA, not {want.device}"
    if want.weights not in ("bfloat16", "float16"):
        return None, f"products of {want.weights} are not measured"
    try:
        library = load()
        space = torch.empty(choice.WORKSPACE, dtype=torch.uint8)
        return Measured(Lt(library, space, getattr(torch, want.weights)), get("platforms", "cuda")()), ""
    except Unsupported as error:
        return None, str(error)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sample(y: Tensor) -> Tensor:
    """Columns from all over the result, in float32: a whole one may be large."""
    return y[:, :: max(1, y.shape[1] // choice.SAMPLE)].float()
