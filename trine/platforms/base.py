"""The contract of a platform: the only place that knows the machine.

A platform knows devices, memory and what the processor can do. It does not know models, pages or plans.

Another vendor is one file in this folder that ends with `PLUGIN = ItsClass`; nothing else names a device. What
it says decides what is used: kernels are asked with `Facts.kind`, and where none answers the reference ones, which
are plain torch, still can. For example:

- Intel (`xpu`): torch.xpu has streams, events and mem_get_info under the same names, Triton has a back end;
  `graph()` is None until torch's graphs are there, collectives "xccl".
- Ascend (`npu`): importing torch_npu in `cannot` registers torch.npu, which mirrors torch.cuda; collectives "hccl".
- Apple (`mps`): memory is shared with the CPU (`torch.mps.recommended_max_memory`), events from torch.mps.event,
  `host_buffer` is ordinary memory, no graph; the reference kernels.
- TPU (`xla`): torch_xla compiles whole steps, so `graph().capture` is its compilation and rows come in the
  same buckets as for CUDA graphs; `asynchronous`, events wait on the step's result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from msgspec import Struct


class Facts(Struct, frozen=True):
    """What the machine is. Read once, at the start."""

    kind: str  # "cpu", "cuda", "rocm": the name of the platform, and what kernels are asked with
    chip: str  # as it names itself
    cores: int  # that this process may use; of a GPU its multiprocessors
    memory: int  # bytes that this process may use in all
    features: tuple[str, ...] = ()  # of the processor that kernels ask about: "avx2", "vnni", "amx", ...
    capability: tuple[int, int] = (0, 0)  # generation of a GPU, as its vendor counts


class Event(Protocol):
    """A point in what was ordered. Free to make, meant to be used again and again."""

    def record(self) -> None:
        """Here: behind all that was ordered so far."""
        ...

    def done(self) -> bool:
        """Whether the device got there; does not wait."""
        ...

    def wait(self) -> None:
        """The caller waits until it got there."""
        ...

    def since(self, earlier: Any) -> float:
        """Seconds on the device from an earlier event to this one; both are done."""
        ...


class Stream(Protocol):
    """A second line of orders, beside the usual one. Both may be captured in one graph."""

    def fork(self) -> AbstractContextManager[Any]:
        """What is ordered inside starts after all that was ordered before, and runs beside what comes next."""
        ...

    def join(self) -> None:
        """What is ordered from here on starts after all that was ordered inside `fork`."""
        ...


class Captured(Protocol):
    """Recorded orders."""

    value: Any  # what the call returned: filled anew by each replay, good until another graph of the same object replays

    def replay(self) -> None: ...


class Graph(Protocol):
    """Records orders and repeats them at once. Graphs of one object share memory: one replays at a time."""

    def capture(self, call: Callable[[], Any]) -> Captured:
        """Run `call` once, recording what it orders instead of doing it. It must have been run for real before
        (kernels are compiled then) and must not wait for the device. What it raises is raised, and another
        capture may follow."""
        ...


class Platform(Protocol):
    """One kind of machine."""

    name: str
    order: int  # tried from low to high; the CPU is last
    asynchronous: bool  # orders return before they are done: host and device work at the same time

    @classmethod
    def cannot(cls) -> str | None:
        """Why this machine is not of that kind; None if it is."""
        ...

    def device(self, rank: int = 0) -> torch.device:
        """The device of a rank; it becomes the current one of the calling thread."""
        ...

    def facts(self) -> Facts: ...

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all, of the device."""
        ...

    def threads(self, count: int) -> None:
        """Use so many threads for each operation from now on."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory from which copies to the device may overlap with compute."""
        ...

    def event(self) -> Event: ...

    def stream(self) -> Stream: ...

    def synchronize(self) -> None:
        """Wait for all that was ordered."""
        ...

    def graph(self) -> Graph | None:
        """How to capture and replay a step; None: run eagerly."""
        ...

    def collectives(self) -> str:
        """The back end of torch.distributed for this kind."""
        ...
