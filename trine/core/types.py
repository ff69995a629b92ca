"""The words: what is asked, what lives, what is ordered, what comes back.

Messages are frozen msgspec structs; the living record is a slotted dataclass. Nothing here
knows of torch, of pages' tensors, or of HTTP. Shapes and units are in the comments.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec import Struct


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Greedy is temperature 0, and 0 means exactly that."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition: float = 1.0  # over prompt and output; 1: off
    presence: float = 0.0  # over output
    frequency: float = 0.0  # over output
    seed: int | None = None  # None: drawn when the request is admitted
    max_tokens: int = 1024
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # the model's end-of-text ids are added at admission
    ignore_eos: bool = False  # True: they are not added
    logprobs: int | None = None  # how many alternatives; 0: the chosen only; None: none
    bias: dict[int, float] = {}


class Request(Struct, frozen=True, omit_defaults=True, tag=True):
    """What a client asked, already tokenized. Never changes."""

    id: str
    tokens: list[int]
    sampling: Sampling = Sampling()
    emitted: int = 0  # of `tokens`, how many at the end were output of a lost engine: a replay
    space: str = ""  # cache namespace, from the authenticated tenant, never from the body alone
    priority: int = 0
    arrived: float = 0.0  # seconds, monotonic clock of whoever made the request

    @property
    def prompt(self) -> int:
        """How many of `tokens` are the client's own."""
        return len(self.tokens) - self.emitted


class Group(Struct, frozen=True):
    """Layers that keep KV of one kind share a page table: its pool, in numbers."""

    pages: int  # in the pool; page 0 is never given out (padding rows write there)
    window: int = 0  # 0: every position is kept; else only the last `window` are needed


class Status(Enum):
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's living record of one request. Only the host sees it.

    `todo`, the gap between the tokens there are and the tokens whose KV is planned, is all
    the scheduler ever works on: prompts, chunks, decoding, forced tokens and drafts alike.
    """

    request: Request
    tokens: array[int]  # ids the host knows ("i"): prompt, then output
    promised: int = 0  # at most this many more are being sampled in flight
    ahead: list[int] = field(default_factory=list[int])  # ids a grammar forces after the promised one
    unsent: list[int] = field(default_factory=list[int])  # of those, what the device was not told yet
    guessed: bool = False  # has the drafter run after its last token; no matter before it samples in a life
    planned: int = 0  # upper bound of tokens with KV once the flights land
    computed: int = 0  # tokens whose KV is certain
    cached: int = 0  # tokens that its first admission found in the cache
    pages: list[list[int]] = field(
        default_factory=list[list[int]]
    )  # by group, in order; 0: behind the window
    shared: int = 0  # how many leading pages belong to the tree
    node: Any = None  # deepest tree node it holds a lock on
    slot: int = -1  # its row in the device table
    life: int = 0  # grows at each preemption
    waited: int = 0  # times the policy looked past it: ageing
    ticket: int = 0  # order of arrival: the older goes first, and is never preempted for a younger
    limit: int = 0  # tokens it may have at most: by its max_tokens, or by the context
    status: Status = Status.WAITING

    @property
    def length(self) -> int:
        """Tokens there will be at most, once the flights land."""
        return len(self.tokens) + self.promised + len(self.ahead)

    @property
    def todo(self) -> int:
        """The gap: tokens that are known or promised and whose KV is not planned."""
        return self.length - self.planned


class Row(Struct, array_like=True, gc=False):
    """One sequence's share of one step."""

    slot: int
    count: int  # tokens to compute; the device knows from where
    sample: bool  # False in the middle of a prompt
    drafts: int = 0  # the last `drafts` of `count` are guesses to verify


class Join(Struct, array_like=True):
    """A slot gets a new tenant."""

    slot: int
    tokens: bytes  # int32, little endian
    prompt: int  # how many of them are the client's own; the rest is output (preempted or replayed)
    pages: list[list[int]]  # by group
    computed: int  # tokens already in the cache
    sampling: Sampling


class Grant(Struct, array_like=True):
    """Pages of one group for one slot; also corrections after a publish."""

    slot: int
    group: int
    first: int  # index in the slot's page table
    pages: list[int]


class Write(Struct, array_like=True):
    """Token ids to append to a slot's known tokens (forced by a grammar)."""

    slot: int
    tokens: list[int]


class Copy(Struct, array_like=True):
    """A match inside a page: the first `tokens` positions of page `source` go to `target`."""

    group: int
    source: int
    target: int
    tokens: int


class Share(Struct, array_like=True, gc=False):
    """A run of pages that several slots have in common, so that attention reads it once for all of them.

    Entries [first, first + count) of the page table of each of `slots` are the same pages, in every group
    without a window, and all their KV was computed by steps before: each row of a member begins behind
    them. The runs of one slot follow each other without a gap from its first page on, and the members of
    a later one are some of those of the one before it."""

    first: int  # index in the page tables
    count: int  # pages
    slots: list[int]  # two at least; one that has no row in a step is passed over


class Batch(Struct, array_like=True, tag=True):
    """One step's orders, applied in this order: joins, copies, grants, writes, rows.

    `shares` holds for the rows of this batch and of those after it, until another list comes."""

    step: int
    rows: list[Row]
    joins: list[Join] = []
    copies: list[Copy] = []
    grants: list[Grant] = []
    writes: list[Write] = []
    shares: list[Share] | None = None  # None: as before; []: there are none now


class Logprob(Struct, array_like=True, frozen=True):
    """Of one sampled token: its log probability (before temperature and filters, after
    penalties and bias are NOT applied: the model's own distribution), its rank from 1, and
    the `Sampling.logprobs` likeliest ids with theirs."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Result(Struct, array_like=True, tag=True):
    """What a step gave. `tokens` and `logprobs` are by row of the batch."""

    step: int
    tokens: list[list[int]]  # [] (no sample), [t], or accepted drafts + [t]
    logprobs: list[list[Logprob]] | None = None
    seconds: float = 0.0  # of compute
    errors: list[str | None] | None = None  # by row: why its token means nothing (no finite logit)
    idle: float = 0.0  # seconds that the device waited between the step before and this one


class Usage(Struct, frozen=True, omit_defaults=True):
    """Token counts of one request, sent with its last Output."""

    prompt: int
    cached: int  # of the prompt, how many its first admission found in the cache
    output: int
    preemptions: int = 0


class Output(Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """What a client hears of one sequence after one step.

    `finished`: "stop" (the last token is a stop id), "length", "abort" or "error"."""

    id: str
    tokens: list[int]
    finished: str | None = None
    logprobs: list[Logprob] | None = None
    usage: Usage | None = None  # on the last one
    error: str | None = None  # with "error": what to tell the client
