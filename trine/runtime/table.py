"""The device table: all that the device knows of each tenant, by slot.

    Table(slots, max_len, page_size, groups, device, kernel=None, platform=None)
    apply(batch)                         joins, grants, writes: one upload, one kernel
    slots(list, size=0) -> Tensor        slots as indices, with 0 behind them up to `size`; the same tensor if
                                         the list is that of the last call
    singles(Tensor[rows]) -> Singles(ids, positions, write by group, lengths)
                                         rows of one token each, which then count as computed. Nothing of it is
                                         on the host, so it may be captured; rows that only fill up have slot 0
    reached(rows)                        the host's side of `singles`
    gather(rows) -> Step                 for rows of any count, in the order given, host's side included;
                                         those of one token come first
    append(slots: Tensor[rows], tokens)  one sampled token each; the host's side is `grown(list)`,
                                         for the slots where it matters
    asked(slots: list) -> Rows           what is asked of the next token of each, for a Chooser
    reach[slot], least[slot]             host: at most so many tokens are computed; at least so many are known
    state.tokens, .pages, .known, ...    the tensors; `pages` is by group [slots, pages]

A step is gathered from the table, so a batch only says who computes how many tokens. It keeps its
own place: known and computed grow on the device, without the host being asked. Penalties need no counts:
the tokens themselves are here, and only rows that ask for penalties read them. Indices are int64 on a CPU and
int32 elsewhere; what is kept is int32 everywhere. It knows nothing of models, and never waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trine.core.types import Batch, Row, Sampling
from trine.kernels.attention.base import Bounds, Step
from trine.kernels.sampling.base import Ask, Rows
from trine.kernels.table.base import REALS, Keeper, Singles, make_state
from trine.kernels.table.reference import Reference

from .orders import Packer
from .staging import Staging


class Table:
    """By slot; slot 0 is never given out."""

    def __init__(
        self,
        slots: int,
        max_len: int,
        page_size: int,
        groups: int,
        device: torch.device,
        kernel: Keeper | None = None,
        platform: Any = None,
    ) -> None:
        width = -(-max_len // page_size)
        # one position more than a context holds: its last token is sampled, and never computed
        self.state = make_state(slots, max_len + 1, width, groups, page_size, device)
        self.pages = list(self.state.pages.unbind())  # by group: [slots, pages]
        self.page_size, self.max_len = page_size, max_len
        self.kernel = Reference() if kernel is None else kernel
        self.staging = Staging(device, platform)
        self.asks: list[Ask | None] = [None] * slots
        self.reach = [0] * slots  # the host's own bound of `computed`: sizes launches
        self.least = [0] * slots  # and of `known`, from below
        self.joined = 0  # grows with each join: what was remembered of slots is old then
        self.last: tuple[list[int], Tensor] = ([], torch.empty(0))  # slots, and what was made of them

    def apply(self, batch: Batch) -> None:
        """Joins, grants, writes, in this order."""
        if not (batch.joins or batch.grants or batch.writes):
            return
        packer = Packer(self.state, self.staging.room(Packer.size(batch)))
        for join in batch.joins:
            ask = self.asks[join.slot] = make_ask(join.sampling, join.prompt)
            packer.join(join, ask)
            self.reach[join.slot], self.least[join.slot] = join.computed, len(join.tokens) // 4
        self.joined += len(batch.joins)
        for grant in batch.grants:
            packer.grant(grant)
        for write in batch.writes:
            packer.write(write)
            self.least[write.slot] += len(write.tokens)
        words, runs = packer.end()
        self.kernel.apply(self.state, self.staging.send(packer.room, words), runs)

    def slots(self, slots: list[int], size: int = 0) -> Tensor:
        """[rows, or size if that is more] on the device."""
        size = max(size, len(slots))
        known, tensor = self.last
        if known != slots or len(tensor) < size:
            tensor = self.staging.index(slots + [0] * (size - len(slots)))
            self.last = slots, tensor
        return tensor if len(tensor) == size else tensor[:size]

    def singles(self, slots: Tensor) -> Singles:
        """The next token of each, as kernels.table.base says."""
        return self.kernel.singles(self.state, slots)

    def reached(self, rows: list[Row]) -> None:
        """These rows are computed, as far as the host goes."""
        reach = self.reach
        for row in rows:
            reach[row.slot] += row.count

    def gather(self, rows: list[Row]) -> Step:
        """All that a step of these rows is, but for what the backends of attention make of it."""
        each, slots = [row.count for row in rows], [row.slot for row in rows]
        counts = np.array(each)
        n, stops = len(rows), np.cumsum(counts)
        wanted = stops[[row.sample for row in rows]] - 1
        parts = (slots, [0], stops, wanted, np.repeat(np.arange(n), counts))
        sent = self.staging.index(np.concatenate(parts))
        slot, starts, last, owner = sent.split([n, n + 1, len(wanted), int(stops[-1])])
        found = self.kernel.ragged(self.state, slot, starts, owner)
        self.reached(rows)
        return Step(
            ids=found.ids,
            positions=found.positions,
            write=found.write,
            starts=starts,
            lengths=found.lengths,
            pages=self.pages,
            wanted=last,
            slots=slot,
            singles=each.count(1),
            attention=[],
            bound=Bounds(int(stops[-1]), max(each), max(self.reach[s] for s in slots)),
        )

    def append(self, slots: Tensor, tokens: Tensor) -> None:
        """One sampled token [rows] for each of slots [rows]; those of slot 0 are dropped."""
        self.kernel.append(self.state, slots, tokens)

    def grown(self, slots: list[int]) -> None:
        """Each of these has one token more, as far as the host goes."""
        least = self.least
        for slot in slots:
            least[slot] += 1

    def asked(self, slots: list[int]) -> Rows:
        """What is asked of the next token of these slots; nothing yet of masks and of who is early."""
        asks = [self._ask(slot) for slot in slots]
        return Rows(self.state, self.slots(slots), asks, [], {}, self.staging.index)

    def early(self, slots: list[int]) -> list[int]:
        """Which of these, by place, may have fewer tokens of output than they must have before they end."""
        return [
            i
            for i, slot in enumerate(slots)
            if (ask := self._ask(slot)).wholes[2] > 0 and self.least[slot] - ask.prompt < ask.wholes[2]
        ]

    def _ask(self, slot: int) -> Ask:
        ask = self.asks[slot]
        assert ask is not None, f"slot {slot} was never joined"
        return ask


def make_ask(sampling: Sampling, prompt: int = 0) -> Ask:
    """Sampling as kernels want it."""
    bias = None
    if sampling.bias:
        ids = np.fromiter(sampling.bias, np.int64, len(sampling.bias))
        bias = ids, np.fromiter(sampling.bias.values(), np.float32, len(ids))
    return Ask(
        reals=tuple(getattr(sampling, name) for name in REALS),
        wholes=(sampling.top_k, _seed(sampling), sampling.min_tokens),
        stops=np.array(sampling.stop_ids, np.int64),
        bias=bias,
        logprobs=sampling.logprobs,
        draws=sampling.temperature != 0.0,
        filters=sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0,
        penalties=(sampling.repetition, sampling.presence, sampling.frequency) != (1.0, 0.0, 0.0),
        prompt=prompt,
    )


def _seed(sampling: Sampling) -> int:
    """Any integer, folded into a signed word of 64 bits. The engine has drawn one if none was given."""
    assert sampling.seed is not None, "a request without a seed got to the device"
    return (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)
