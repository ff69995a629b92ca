"""Frames between the faces' process and the engine process: zmq over Unix sockets.

The face binds both sockets in its run folder (folder 0700, sockets 0600), the engine connects,
and the names are removed once it has: from then on nobody else can even try. A frame is the
secret of this engine's life (16 bytes, sent over its standard input), a counter (8 bytes, 0: out of order), and
a msgpack list of messages. Whatever else arrives is dropped and counted. This file does not
know what the messages mean.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from trine.config import Config
from trine.core.messages import FRAME_BYTES, encode

SECRET_BYTES = 16
HEAD_BYTES = SECRET_BYTES + 8
QUEUE_FRAMES = 1000  # unread frames before a sender has to wait
# What a decoder may raise on hostile bytes: nesting, impossible lengths and bad UTF-8 included.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)

log = logging.getLogger(__name__)
Message = TypeVar("Message")


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process reads from its standard input, once, before anything else."""

    config: Config  # without keys
    path: str
    parent: int  # its process id
    folder: str  # removed by the engine if the parent dies before the sockets are connected
    requests: str  # socket the engine reads
    outputs: str  # socket the engine writes
    secret: bytes


def bind(context: Any, kind: int, path: Path) -> Any:
    """A bound socket with mode 0600 and every bound set; `path` must fit a Unix address."""
    socket = limited(context, kind)
    socket.bind(f"ipc://{path}")
    os.chmod(path, 0o600)
    return socket


def connect(context: Any, kind: int, path: str) -> Any:
    """The other end of `bind`."""
    socket = limited(context, kind)
    socket.connect(f"ipc://{path}")
    return socket


def limited(context: Any, kind: int) -> Any:
    """A socket on which nothing grows without end, and that never holds up an exit."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


@dataclass(slots=True)
class Writer:
    """Turns messages into frames with growing counters."""

    secret: bytes
    counter: int = 0

    def frames(self, messages: list[Any]) -> Iterator[bytes]:
        """As few frames as the size limit allows; a single message above it is ValueError."""
        body = encode(messages)
        if len(body) + HEAD_BYTES <= FRAME_BYTES:
            self.counter += 1
            yield self.secret + self.counter.to_bytes(8, "little") + body
        elif len(messages) > 1:
            yield from self.frames(messages[: len(messages) // 2])
            yield from self.frames(messages[len(messages) // 2 :])
        else:
            raise ValueError(f"a message of {len(body)} bytes; at most {FRAME_BYTES - HEAD_BYTES} fit")

    def loose(self, message: Any) -> bytes:
        """A frame out of order, for a second sender."""
        return self.secret + bytes(8) + encode([message])


@dataclass(slots=True)
class Reader(Generic[Message]):
    """Turns frames into messages; counts what it drops and says so once for each kind."""

    secret: bytes
    decode: Callable[[bytes], list[Message]]
    counter: int = 0
    bad: int = 0  # not ours, or not readable
    repeated: int = 0  # seen before
    lost: int = 0  # never came, although later ones did
    _said: set[str] = field(default_factory=set)

    def take(self, frame: bytes) -> list[Message]:
        """The messages of a frame, [] if it is to be dropped."""
        if len(frame) < HEAD_BYTES or not hmac.compare_digest(frame[:SECRET_BYTES], self.secret):
            return self._bad(frame, "it does not begin with the secret of this engine")
        try:
            messages = self.decode(memoryview(frame)[HEAD_BYTES:])  # type: ignore[arg-type]
        except UNREADABLE as error:
            return self._bad(frame, f"{type(error).__name__}: {error}")
        if counter := int.from_bytes(frame[SECRET_BYTES:HEAD_BYTES], "little"):
            if counter <= self.counter:
                self.repeated += 1
                self._say("repeated frame", f"number {counter} after {self.counter}")
                return []
            self.lost += counter - self.counter - 1
            self.counter = counter
        return messages

    def _bad(self, frame: bytes, why: str) -> list[Message]:
        self.bad += 1
        self._say("bad frame", f"{len(frame)} bytes; {why[:200]}")
        return []

    def _say(self, what: str, why: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s dropped: %s (more are counted, not logged)", what, why)
