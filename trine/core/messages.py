"""What crosses process borders: two tagged unions and nothing else.

A frame on the wire is a msgpack *list* of them, so there are no batch wrappers. Frames are
limited to `FRAME_BYTES`; a frame that is larger or does not decode is dropped and counted.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
from msgspec import Struct

from .stats import StepStats
from .types import Output, Request

FRAME_BYTES = 64 * 1024 * 1024


class Abort(Struct, frozen=True, tag=True):
    """Forget these requests; ids that are not known are ignored."""

    ids: list[str]


class Command(Struct, frozen=True, tag=True):
    """Something rare: `name` is one of "flush", "stats", "stop"."""

    ticket: int
    name: str
    values: dict[str, Any] = {}


class Answer(Struct, frozen=True, tag=True):
    """What became of a Command."""

    ticket: int
    value: Any = None
    error: str | None = None


class Ready(Struct, frozen=True, tag=True):
    """The engine can serve. What faces need to know of it; `plan` is the printable plan."""

    pid: int
    model: str
    vocab: int  # token ids are in [0, vocab)
    eos: list[int]
    max_model_len: int
    max_num_seqs: int
    page_size: int
    pages: int  # of the smallest group, without page 0
    plan: list[tuple[str, str, str]]  # name, value, why
    seconds: dict[str, float] = {}  # of the start, by phase


class Beat(Struct, frozen=True, tag=True):
    """Health is progress: sent each 0.25 s, busy or not, from a thread that does nothing else."""

    step: int  # steps committed so far
    busy: bool  # is there work
    idle: float  # seconds since the last token was committed, 0 when there is no work


class Fatal(Struct, frozen=True, tag=True):
    """The engine is about to die: the traceback."""

    error: str
    refused: bool = False  # it never served, and `error` is a line for a person: what was asked cannot be


ToEngine = Union[Request, Abort, Command]
FromEngine = Union[Output, StepStats, Answer, Ready, Beat, Fatal]


def encode(messages: list[Any]) -> bytes:
    """One frame."""
    return msgspec.msgpack.encode(messages)


def to_engine(frame: bytes) -> list[ToEngine]:
    """Decode a frame for the engine; msgspec.DecodeError or ValidationError if it is not one."""
    return msgspec.msgpack.decode(frame, type=list[ToEngine])


def from_engine(frame: bytes) -> list[FromEngine]:
    """Decode a frame from the engine."""
    return msgspec.msgpack.decode(frame, type=list[FromEngine])
