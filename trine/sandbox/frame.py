"""Messages between a sandbox's parent and its child: a length, then msgpack.

Used on both sides. Knows nothing of tasks, limits or processes. A frame longer than the
reader allows is refused before its body is read.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

HEAD = 4  # bytes of the length before each body, little endian


class Call(Struct, array_like=True):
    """What the parent asks."""

    task: str
    payload: Any
    cpu: float  # seconds
    memory: int  # bytes over what the child has when the task starts
    answer: int  # bytes that the answer may have


class Reply(Struct, array_like=True):
    """What the child answers. `kind` is empty when it went well, else says what went wrong:
    "memory" and "answer" are blown budgets, anything else is the name of the task's exception."""

    value: Any = None
    kind: str = ""
    message: str = ""
    last: bool = False  # the child ends after this answer


class TooLong(Exception):
    """A frame over its limit."""


def pack(message: Struct, limit: int) -> bytes:
    """The bytes of one frame; TooLong when its body is over `limit` bytes."""
    body = msgspec.msgpack.encode(message)
    if len(body) > limit:
        raise TooLong(f"{len(body)} bytes, at most {limit} are allowed")
    return len(body).to_bytes(HEAD, "little") + body


def length(head: bytes | bytearray, limit: int) -> int:
    """The length that a frame's head declares; TooLong when over `limit`."""
    if (size := int.from_bytes(head, "little")) > limit:
        raise TooLong(f"{size} bytes, at most {limit} are allowed")
    return size
