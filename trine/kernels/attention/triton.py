"""Attention through the radix tree, in Triton: what several rows share is read once for all of them.

Many rows of one token attend in one launch, `rows`, with a program for each and KV head; where they are few, in two:
`singles`, which cuts them into equal parts, and `merge`. Where shared runs are in force `shared_runs` comes first.
Which program does what is planned on the device, once a step and inside the graph, from the lengths there; what is shared (`share`) lies in buffers of fixed addresses, so a graph replays with new runs, and only whether there
are any (`shares_now`) is fixed in it. Rows of several tokens are tiles of queries; few tiles are cut over positions.

With `invariant` other kernels of the same shape attend in runs of 256 positions, folded in their order, so that
no bit of a row depends on the step; shared runs are not used then.

It does not know why slots share pages, nor what a step is for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.config import interpreted
from trine.core.types import Share
from trine.kernels.installed import missing

from .base import Limits, Step, Store, Want

DEPTH = 8  # shared runs of a slot, one behind the other; what is deeper is read as its own
RUN = 256  # positions of a run, with `invariant`
LONG = 8  # blocks of a prompt's tile that are worth a program of their own
MOST_RUNS = 8192  # of heads of rows that are cut: 16 MiB of results for 4 heads of 128
RING = 8  # pinned buffers: one that the device may still read is not written
HALF = ("bfloat16", "float16")
EIGHTH = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


class Tuning(NamedTuple):
    """How the kernels are cut. Measured on an H200 with heads 32/8/128; others take the same."""

    block: int = 64  # positions in one product
    stages: int = 3  # how far reading runs ahead
    warps: int = 4
    each: int = 2  # programs for each multiprocessor
    row: tuple[int, int] = (32, 4)  # block and stages of a program that has a row for itself,
    copied: tuple[int, int] = (64, 2)  # and where the hardware copies,
    row_warps: int = 2
    whole: float = (
        3.0  # rows times KV heads for each multiprocessor, from which on each has a program of its own
    )
    registers: int = 0  # of a thread, at most; 0: as the compiler likes
    own: tuple[int, int, int] = (64, 3, 3)  # beside shared runs: block, stages, each
    tile: int = 128  # places of a shared run's queries: its rows times the query heads of a KV head
    shared_block: int = 64
    shared_stages: int = 3
    shared_warps: int = 8
    shared_each: int = 1
    copies: bool = True  # whole blocks by the hardware, from sm_90 on
    least: int = 1  # blocks of a program, at least
    prompt: tuple[int, int, int, int] = (64, 64, 4, 3)  # places, positions, warps, stages
    prompt_each: int = 2  # programs for each multiprocessor: fewer tiles are cut over positions
    same: int = 64  # positions in one product, with `invariant`
    join: int = 16  # parts that are merged at a time,
    join_shared: int = 4  # where a program has a row for itself


class Planned(NamedTuple):
    """Of one step, what the host knows."""

    singles: int
    rows: int
    tiles: int  # of prompts, at most
    cuts: int  # of each over positions
    shared: bool  # whether shared runs are in force
    whole: bool = False  # a program for each row of one token and KV head


class Layer:
    """One layer's store, as kernels want it."""

    def __init__(self, keys: Tensor, values: Tensor, want: Want, copies: bool) -> None:
        self.keys, self.values, self.page_size, dim = keys, values, want.page_size, want.head_dim
        plain = all(x.is_contiguous() for x in (keys, values)) and want.kv_dtype == want.dtype
        half = want.dtype in HALF  # float32 is multiplied as it is
        self.copies = copies and plain and half and dim == max(16, _power(dim))
        self.made: dict[int, tuple[Any, Any]] = {}

    def tiles(self, block: int) -> tuple[Any, Any] | None:
        """Descriptors of blocks [block, head_dim] of [places, kv_heads * head_dim], which the hardware copies; None
        where it cannot, or where blocks go over the ends of pages."""
        if not self.copies or self.page_size % block:
            return None
        if block not in self.made:
            describe = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
            shape, dim = (-1, self.keys.shape[2] * self.keys.shape[3]), self.keys.shape[3]
            self.made[block] = (
                describe(self.keys.view(shape), [block, dim]),
                describe(self.values.view(shape), [block, dim]),
            )
        return self.made[block]


class Tree:
    """Persistent launches over lists of segments that the device made."""

    name = "triton"
    order = 50

    @classmethod
    def cannot(cls, want: Want) -> str | None:
        if want.device not in ("cuda", "rocm") and not _interpreted():
            return f"is for GPUs, not for {want.device}"
        if want.heads % want.kv_heads:
            return f"{want.heads} heads cannot share {want.kv_heads} KV heads evenly"
        if want.head_dim > 256 or want.heads // want.kv_heads > 64:
            return "is for heads of at most 256 numbers, and at most 64 of them for each KV head"
        if want.dtype not in (*HALF, "float32") or want.kv_dtype not in (*HALF, "float32", *EIGHTH):
            return f"knows no {want.dtype} with KV of {want.kv_dtype}"
        capability: Any = getattr(want, "capability", (9, 0))
        if want.device == "cuda" and want.kv_dtype in EIGHTH and (0, 0) < capability < (8, 9):
            return f"KV of {want.kv_dtype} needs compute capability 8.9"
        return missing("triton")

    def __init__(
        self,
        want: Want,
        store: Store,
        platform: Any,
        group: int = 0,
        limits: Limits | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.want, self.store, self.platform, self.group = want, store, platform, group
        self.kernels = _kernels("attention")
        self.plans = _kernels("plan")
        self.whole = _kernels("attention_rows")
        self.prompt_kernels = _kernels("attention_prompts")
        self.runs = _kernels("attention_runs")
        self.limits = limits or Limits(256, 257, 2**17, 2**13)
        facts = platform.facts()
        self.modern = facts.kind == "cuda" and facts.capability >= (9, 0)
        self.tuning = tuning or _tune(want, facts)
        self.copies = self.tuning.copies and (self.modern or facts.kind == "cpu")
        self.cores = facts.cores if facts.kind != "cpu" else 5
        self.programs, self.programs2 = self.tuning.each * self.cores, self.tuning.shared_each * self.cores
        self.beside = self.tuning.own[2] * self.cores  # programs, beside shared runs
        self.may_share = not want.window and not want.invariant
        self.shares_now = False
        self.layers: dict[int, Layer] = {}
        self._shape()
        self._reserve(platform.device() if facts.kind != "cpu" else torch.device("cpu"))

    def _shape(self) -> None:
        """What all launches have in common."""
        want, tuning = self.want, self.tuning
        self.G = want.heads // want.kv_heads
        wide = max(16, _power(want.head_dim))
        self.places = max(16, _power(self.G))  # of a tile that one row has for itself
        self.tile = max(tuning.tile, self.places)
        self.prompt = max(tuning.prompt[0], self.places)
        # With `invariant`: one tile and block, whatever it holds; on Hopper 64 places are what four warps multiply.
        self.same = {"M": max(64, self.places), "N": tuning.same, "RUN": RUN, "STAGES": 2, "num_warps": 4}
        self.same["enable_fp_fusion"] = False
        if want.invariant:
            self.prompt = self.same["M"]
        scale = want.head_dim**-0.5 if want.scale is None else want.scale
        self.scale = scale * 1.4426950408889634
        if want.softcap:
            self.scale *= 2 / want.softcap
        self.narrow = _power(self.G)
        self.common = {"H": want.kv_heads, "G": self.G, "D": want.head_dim, "DP": wide, "SINKS": want.sinks}
        self.read = self.common | {
            "PAGE": want.page_size,
            "WINDOW": want.window,
            "SOFTCAP": float(want.softcap),
            "EXACT": want.dtype == "float32",
        }
        self.options: dict[str, Any] = {"launch_pdl": True} if self.modern else {}

    def _reserve(self, device: torch.device) -> None:
        """Buffers, whose addresses graphs know."""
        want, (rows, slots, _, tokens) = self.want, self.limits
        self.S = slots + 1
        self.T = max(1, min(slots // 2, 256)) if self.may_share else 1  # tiles of shared runs
        self.TM = self.tile // self.G
        width = 16 + (2 + DEPTH) * self.S + (2 + self.TM) * self.T
        self.ring = Ring(self.platform, width) if self.may_share else None
        self.next = 0

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.shares, self.head = table(width), table(16)
        self.rows, self.list, self.desk = (
            table(rows, 4),
            table(rows + 2, 8),
            table(max(self.programs, self.beside), 8),
        )
        self.tiles, self.list2, self.desk2 = table(self.T, 4), table(self.T + 2, 8), table(self.programs2, 8)
        self.seats, self.row_of = table(self.T, self.TM), table(self.S)
        self.chain = table(rows + 1, DEPTH, 4)
        self.prompts = table(-(-tokens // (self.prompt // self.G)) + rows, 2)
        most = 2 * self.tuning.prompt_each * self.cores  # parts of prompts
        self.counts = table(most)
        lines = rows * want.kv_heads + max(self.programs, self.beside)
        lines = (MOST_RUNS if want.invariant else lines) * self.G
        lines2 = (self.T * want.kv_heads + self.programs2) * self.tile if self.may_share else 0
        if not want.invariant:
            lines2 = max(lines2, most * self.prompt)

        def parts(lines: int, width: int) -> Tensor:
            return torch.empty(lines, width, dtype=torch.float32, device=device)

        self.values, self.sums = parts(lines, want.head_dim), parts(lines, 2)
        self.values2, self.sums2 = parts(max(lines2, 1), want.head_dim), parts(max(lines2, 1), 2)

    def share(self, shares: list[Share]) -> None:
        if self.ring is None:
            return
        buffer = self.ring.take()
        self.shares_now = lay_out(shares, buffer.numpy(), self.S, self.T, self.TM, self.want.page_size) > 0
        self.shares.copy_(buffer, non_blocking=True)
        self.ring.sent()

    def plan(self, step: Step) -> Planned:
        rows, shared, tuning = len(step.lengths), self.shares_now, self.tuning
        tiles = -(-(step.bound.tokens - step.singles) // (self.prompt // self.G)) + rows - step.singles
        # A program for each row and head needs no plan of its own, and is the fastest where there are enough.
        enough = step.singles * self.want.kv_heads >= tuning.whole * self.cores
        whole = enough and not self.want.invariant
        if step.singles and (shared or not whole):
            self.plans.plan_singles[(1,)](
                step.slots, step.lengths, self.shares, self.head, self.rows, self.list, self.desk, self.tiles,
                self.list2, self.desk2, self.seats, self.row_of, self.chain, step.singles,
                self.beside if shared else self.programs, self.programs2, H=self.want.kv_heads, S=self.S, T=self.T,
                TM=self.TM, DEPTH=DEPTH, N1=tuning.own[0] if shared else tuning.block, N2=tuning.shared_block,
                LEAST=tuning.least, RB=min(1024, _power(self.limits.rows)), TB=16, WINDOW=self.want.window,
                SHARED=shared, RUN=RUN if self.want.invariant else 0, MOST=MOST_RUNS, WHOLE=whole, PDL=self.modern,
                num_warps=8,
                **self.options,
            )  # fmt: skip
        if rows == step.singles:
            return Planned(step.singles, rows, 0, 1, shared, whole)
        self.plans.plan_prompts[(1,)](
            step.starts, self.head, self.prompts, step.singles, rows, TM=self.prompt // self.G, RB=128
        )
        room = tuning.prompt_each * self.cores // (tiles * self.want.kv_heads)
        cuts = 1 if self.want.invariant else max(1, min(room, step.bound.length // (LONG * tuning.prompt[1])))
        return Planned(step.singles, rows, tiles, cuts, shared, whole)

    def run(self, q: Tensor, layer: int, step: Step, sinks: Tensor | None = None) -> Tensor:
        """`sinks` [heads]: a logit for each query head, where `want.sinks`."""
        plan: Planned = step.attention[self.group]
        if layer not in self.layers:
            self.layers[layer] = Layer(*self.store.layer(layer), self.want, self.copies)
        kv = self.layers[layer]
        k, v = kv.keys, kv.values
        tokens = q.shape[0]  # len() of a tensor takes as long as a launch
        q = q.view(tokens, self.want.heads, -1)
        out = torch.empty((tokens, self.want.heads * self.want.head_dim), dtype=q.dtype, device=q.device)
        sink = q if sinks is None else sinks
        if plan.singles and self.want.invariant:
            self._runs(q, k, v, plan, step, out, sink)
        elif plan.whole:
            self._whole(q, kv, plan, step, out, sink)
        elif plan.singles:
            self._singles(q, kv, plan, step, out, sink)
        if plan.rows > plan.singles:
            self._prompts(q, kv, plan, step, out, sink)
        return out

    def _whole(self, q: Tensor, kv: Layer, plan: Planned, step: Step, out: Tensor, sink: Tensor) -> None:
        k, v, pages, tuning = kv.keys, kv.values, step.pages[self.group], self.tuning
        if plan.shared:
            self._shared(q, kv, pages)
        tiles = kv.tiles(tuning.copied[0])
        block, stages = tuning.row if tiles is None else tuning.copied
        self.whole.rows[(self.want.kv_heads, plan.singles)](
            q, k, v, *(tiles or (k, v)), pages, step.slots, step.lengths, out, sink, self.shares[16:], self.head,
            self.chain, self.values2, self.sums2, q.stride(0), pages.stride(0), k.stride(0), k.stride(1), k.stride(2),
            self.scale, M=self.places, GP=self.narrow, N=block, STAGES=stages, COPIES=tiles is not None,
            SHARED=plan.shared, S=self.S, M2=self.tile, DEPTH=DEPTH, B=tuning.join_shared, PDL=self.modern,
            num_warps=tuning.row_warps, **self.read, **self.options,
        )  # fmt: skip

    def _singles(self, q: Tensor, kv: Layer, plan: Planned, step: Step, out: Tensor, sink: Tensor) -> None:
        k, v, tuning, pages = kv.keys, kv.values, self.tuning, step.pages[self.group]
        if plan.shared:
            self._shared(q, kv, pages)
        limit = {"maxnreg": tuning.registers} if tuning.registers else {}
        block, stages, _ = tuning.own if plan.shared else (tuning.block, tuning.stages, 0)
        read = {name: value for name, value in self.read.items() if name != "SINKS"}
        self.kernels.singles[(self.beside if plan.shared else self.programs,)](
            q, k, v, pages, self.head, self.list, self.desk, self.values, self.sums, q.stride(0), pages.stride(0),
            k.stride(0), k.stride(1), k.stride(2), self.scale, M=self.places, GP=self.narrow, N=block, STAGES=stages,
            SHARED=plan.shared, PDL=self.modern, num_warps=tuning.warps, **read, **self.options, **limit,
        )  # fmt: skip
        self.kernels.merge[(plan.singles, self.want.kv_heads)](
            self.head, self.rows, self.chain, self.values, self.sums, self.values2, self.sums2, out, sink,
            GP=self.narrow, SHARED=plan.shared, M2=self.tile, DEPTH=DEPTH, B=tuning.join, PDL=self.modern,
            num_warps=4, **self.common, **self.options,
        )  # fmt: skip

    def _shared(self, q: Tensor, kv: Layer, pages: Tensor) -> None:
        k, v, tuning = kv.keys, kv.values, self.tuning
        tiles = kv.tiles(tuning.shared_block)
        read = {name: value for name, value in self.read.items() if name not in ("SINKS", "WINDOW")}
        self.kernels.shared_runs[(self.programs2,)](
            q, k, v, *(tiles or (k, v)), pages, self.head, self.list2, self.desk2, self.seats, self.values2,
            self.sums2, q.stride(0), pages.stride(0), k.stride(0), k.stride(1), k.stride(2), self.scale,
            M=self.tile, N=tuning.shared_block, STAGES=tuning.shared_stages, COPIES=tiles is not None,
            PDL=self.modern, num_warps=tuning.shared_warps, **read, **self.options,
        )  # fmt: skip

    def _prompts(self, q: Tensor, kv: Layer, plan: Planned, step: Step, out: Tensor, sink: Tensor) -> None:
        k, v = kv.keys, kv.values
        pages, (_, block, warps, stages) = step.pages[self.group], self.tuning.prompt
        known = (pages, out, sink, step.slots, step.starts, step.lengths, self.head, self.prompts)
        place = (q.stride(0), pages.stride(0), k.stride(0), k.stride(1), k.stride(2), self.scale)
        if self.want.invariant:
            self.runs.prompt_runs[(self.want.kv_heads, plan.tiles)](
                q, k, v, *known, *place, **self.same, **self.read
            )
            return
        tiles = kv.tiles(block)
        self.prompt_kernels.prompts[(self.want.kv_heads, plan.tiles, plan.cuts)](
            q, k, v, *(tiles or (k, v)), *known, self.counts, self.values2, self.sums2, *place, plan.cuts, M=self.prompt, N=block, STAGES=stages,
            SPLIT=plan.cuts > 1, COPIES=tiles is not None, num_warps=warps, **self.read,
        )  # fmt: skip

    def _runs(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Planned, step: Step, out: Tensor, sink: Tensor
    ) -> None:
        pages = step.pages[self.group]
        self.runs.runs[(self.programs,)](
            q, k, v, pages, out, sink, self.head, self.list, self.desk, self.values, self.sums, q.stride(0),
            pages.stride(0), k.stride(0), k.stride(1), k.stride(2), self.scale, PDL=self.modern, **self.same,
            **self.read, **self.options,
        )  # fmt: skip
        self.runs.merge_runs[(plan.singles, self.want.kv_heads)](
            self.head, self.rows, self.values, self.sums, out, sink, GP=_power(self.G), PDL=self.modern,
            num_warps=4, enable_fp_fusion=False, **self.common, **self.options,
        )  # fmt: skip


class Ring:
    """Pinned buffers to copy from. It waits only where all of them are still on their way."""

    def __init__(self, platform: Any, width: int) -> None:
        self.buffers = [platform.host_buffer((width,), torch.int32) for _ in range(RING)]
        self.events = [platform.event() for _ in range(RING)] if platform.facts().kind != "cpu" else []
        self.used = [False] * RING
        self.at = 0

    def take(self) -> Tensor:
        self.at = (self.at + 1) % RING
        if self.events and self.used[self.at]:
            self.events[self.at].wait()
        return self.buffers[self.at]

    def sent(self) -> None:
        if self.events:
            self.events[self.at].record()
            self.used[self.at] = True


def lay_out(shares: list[Share], to: Any, slots: int, tiles: int, seats: int, page_size: int) -> int:
    """Fills `to`, int32: tiles; 16: own [slots]: where a slot's own positions begin; depth [slots]; chain
    [slots, DEPTH]: tile * seats + seat, in the order of positions; of each tile first [tiles], count [tiles] in
    positions, slots [tiles, seats]. Returns how many tiles there are.

    A slot's runs must follow one another from position 0; what does not, or finds no room, is its own."""
    to[:] = 0
    own = to[16 : 16 + slots]
    depth = to[16 + slots : 16 + 2 * slots]
    chain = to[16 + 2 * slots : 16 + (2 + DEPTH) * slots].reshape(slots, DEPTH)
    runs = to[16 + (2 + DEPTH) * slots :]
    first, count, members = runs[:tiles], runs[tiles : 2 * tiles], runs[2 * tiles :].reshape(tiles, seats)
    used = 0
    for share in sorted(shares, key=lambda share: share.first):
        fit = [
            slot
            for slot in dict.fromkeys(share.slots)
            if 0 < slot < slots and own[slot] == share.first * page_size and depth[slot] < DEPTH
        ]
        cuts = -(-len(fit) // seats)
        end = (share.first + share.count) * page_size
        if len(fit) < 2 or used + cuts > tiles or share.count <= 0 or end >= 2**31:
            continue
        for i in range(cuts):
            part = fit[len(fit) * i // cuts : len(fit) * (i + 1) // cuts]
            first[used], count[used] = share.first * page_size, share.count * page_size
            for seat, slot in enumerate(part):
                members[used, seat] = slot
                chain[slot, depth[slot]] = used * seats + seat
                depth[slot] += 1
                own[slot] += share.count * page_size
            used += 1
    to[0] = used
    return used


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _tune(want: Want, facts: Any) -> Tuning:
    """Wide heads take smaller blocks, so that what is on its way fits in a multiprocessor's memory."""
    wide = max(16, _power(want.head_dim)) * (2 if want.dtype == "float32" else 1)
    if facts.kind == "cpu":
        small = {"shared_block": 32, "shared_stages": 1, "shared_each": 1, "prompt": (32, 16, 4, 1)}
        return Tuning(
            block=16, stages=1, each=1, own=(16, 1, 1), row=(16, 1), copied=(16, 1), tile=32, join=4, **small
        )
    if facts.kind == "rocm" or facts.capability < (9, 0):
        block = 32 if wide > 128 else 64
        cut = {"row": (32, 2), "stages": 2, "own": (block, 2, 2), "shared_block": block, "shared_stages": 2}
        return Tuning(block=block, prompt=(64, block, 4, 2), same=block, **cut)
    if wide > 128:
        return Tuning(
            block=32, own=(32, 3, 3), copied=(32, 2), shared_block=32, prompt=(128, 32, 8, 2), same=32
        )
    return Tuning()


def _kernels(name: str) -> Any:
    from trine.kernels.jit import quick

    return quick(import_module(f"trine.kernels.jit.{name}"))


def _interpreted() -> bool:
    """Tests run the kernels on a CPU. Triton is not imported only to ask it."""
    return interpreted() and find_spec("triton") is not None


PLUGIN = Tree
