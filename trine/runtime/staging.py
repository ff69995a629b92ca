"""How numbers of the host get to the device without anybody waiting, and back.

Upwards there is a small ring of buffers in memory that a device can copy from by itself; one is written again
only when the copy out of it is done. Downwards a report is copied behind the work that makes it, into a buffer
that is its own until it was read. On a CPU neither copies anything. It does not know what the numbers mean.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.int32]

DEEP = 4  # buffers in the ring: two steps in flight, each with an order and a list of rows
FIRST = 1 << 16  # words of a buffer at first


class Buffer:
    """Host memory, and when the last copy out of it (or into it) is done."""

    def __init__(self, words: int, platform: Any) -> None:
        self.tensor = platform.host_buffer((words,), torch.int32)
        self.array: Words = self.tensor.numpy()
        self.event = platform.event()
        self.used = False

    def rest(self) -> None:
        """Wait until nothing copies any more."""
        if self.used:
            self.event.wait()
            self.used = False


class Staging:
    """Uploads. One thread, one line of orders."""

    def __init__(self, device: torch.device, platform: Any = None) -> None:
        assert platform is not None or device.type == "cpu", "only a CPU needs no platform"
        self.device, self.platform = device, platform
        self.direct = device.type == "cpu"
        self.ring: deque[Buffer] = deque()

    def room(self, words: int) -> Words:
        """Memory to write in; `send` sends it. At least so many words."""
        if self.direct:
            return np.empty(words, np.int32)
        if len(self.ring) < DEEP:
            self.ring.appendleft(Buffer(max(words, FIRST), self.platform))
        buffer = self.ring[0]
        buffer.rest()
        if len(buffer.array) < words:  # twice as much: it will be asked again
            buffer = self.ring[0] = Buffer(2 * words, self.platform)
        return buffer.array

    def send(self, room: Words, words: int) -> Tensor:
        """The first `words` of what `room` gave, on the device: [words] int32."""
        if self.direct:
            return torch.from_numpy(room[:words])
        buffer = self.ring[0]
        assert buffer.array is room, "only the room that was taken last can be sent"
        sent = buffer.tensor[:words].to(self.device, non_blocking=True)
        buffer.event.record()
        buffer.used = True
        self.ring.rotate(-1)
        return sent

    def index(self, values: Any) -> Tensor:
        """Integers as indices of the device: [n] int64 on a CPU, int32 elsewhere."""
        if self.direct:
            return torch.from_numpy(np.asarray(values, np.int64))
        room = self.room(len(values))
        room[: len(values)] = values
        return self.send(room, len(values))


class Report:
    """A device tensor on its way to the host."""

    def __init__(self, sent: Tensor, buffer: Buffer | None = None) -> None:
        self.sent, self.buffer = sent, buffer

    def array(self) -> NDArray[Any]:
        """When the copy is done. To be read before the buffer is given back."""
        if self.buffer is None:
            return self.sent.numpy()
        words = self.buffer.array[: self.sent.numel()]
        return words.view(_NUMPY[self.sent.dtype]).reshape(tuple(self.sent.shape))


class Reports:
    """Downloads: buffers that are used again when they were read."""

    def __init__(self, device: torch.device, platform: Any = None) -> None:
        self.direct, self.platform = device.type == "cpu", platform
        self.free: list[Buffer] = []

    def take(self, tensor: Tensor) -> Report:
        """Order the copy of a tensor of words of 32 bits. Its event is for the caller to record."""
        if self.direct:
            return Report(tensor)
        size = tensor.numel()
        place = next((i for i, b in enumerate(self.free) if len(b.array) >= size), None)
        buffer = Buffer(max(2 * size, 1024), self.platform) if place is None else self.free.pop(place)
        buffer.tensor[:size].view(tensor.dtype).copy_(tensor.reshape(-1), non_blocking=True)
        return Report(tensor, buffer)

    def give(self, report: Report) -> None:
        """It was read."""
        if report.buffer is not None:
            self.free.append(report.buffer)


_NUMPY = {torch.int32: np.int32, torch.float32: np.float32}
