"""NVIDIA GPUs: the only file that says torch.cuda.

Memory is what the driver says is free now, so a GPU may be shared. It does not know what runs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .base import Facts

# As the CUDA array interface calls them.
NUMBERS = {torch.float32: "<f4", torch.float16: "<f2", torch.int32: "<i4", torch.int64: "<i8"}


class Cuda:
    """One GPU for each rank."""

    name = "cuda"
    order = 10
    asynchronous = True

    @classmethod
    def cannot(cls) -> str | None:
        if torch.version.hip:
            return "this torch is built for ROCm"
        if not torch.version.cuda:
            return "this torch is built without CUDA"
        return cls._missing()

    @staticmethod
    def _missing() -> str | None:
        try:
            if torch.cuda.device_count() < 1:
                return "there is no GPU"
            torch.cuda.init()
        except Exception as error:  # of many kinds: an old driver, no permission, a GPU in a bad state
            return f"the GPU cannot be used: {str(error).partition(chr(10))[0]}"
        return None

    def device(self, rank: int = 0) -> torch.device:
        torch.cuda.set_device(rank)
        if self.name == "cuda":
            # For some 50 to 200 rows its choices are faster (an 8B model's products, H200: 134.6 us a layer at 50
            # rows instead of 139.2, 152.9 at 160 instead of 155.4), else they are the same.
            torch.backends.cuda.preferred_blas_library("cublaslt")
        return torch.device("cuda", rank)

    def facts(self) -> Facts:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Facts(
            kind=self.name,
            chip=found.name,
            cores=found.multi_processor_count,
            memory=found.total_memory,
            capability=(found.major, found.minor),
        )

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return free, total

    def threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def event(self) -> Event:
        return Event()

    def stream(self) -> Stream:
        return Stream()

    def stream_address(self) -> int:
        """The current stream, as libraries in C take it."""
        return torch.cuda.current_stream().cuda_stream

    def occupy(self, seconds: float) -> None:
        """Keep the device from what is ordered next for so long, about: its clock is near 2 GHz."""
        torch.cuda._sleep(int(seconds * 2e9))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def launches(self, call: Callable[[], Any]) -> int:
        """Kernels that `call` orders, copies not counted."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        orders = [event for event in seen.events() or [] if event.device_type.name == "CUDA"]
        return sum(not event.name.startswith(("Memcpy", "Memset")) for event in orders)

    def graph(self) -> Graph:
        return Graph()

    def collectives(self) -> str:
        return "nccl"


class Event:
    """On the stream that is current when it is recorded."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self.event.record()

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: Event) -> float:
        return earlier.event.elapsed_time(self.event) / 1e3


class Stream:
    """Events order both streams, so that a capture of one takes in the other."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


class Captured:
    """One CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, value: Any) -> None:
        self.graph, self.value = graph, value

    def replay(self) -> None:
        self.graph.replay()


class Memory:
    """A tensor's memory without the tensor: it does not keep the allocator from using it again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": NUMBERS[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def lent(value: Any) -> Any:
    """The same memory, given back to its pool: other graphs of the pool may use it too, as one replays at a time.

    Otherwise the logits of every captured number of rows would keep memory of their own, which is gigabytes."""
    if isinstance(value, torch.Tensor) and value.dtype in NUMBERS and value.is_contiguous():
        return torch.as_tensor(Memory(value), device=value.device)
    return value


class Graph:
    """Captures on a stream of its own, with one pool of memory for all its graphs.

    Made by hand rather than with torch.cuda.graph: a capture that fails there leaves its stream current."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.broken: list[torch.cuda.CUDAGraph] = []  # the allocator may still point at them

    def capture(self, call: Callable[[], Any]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            # Only this thread is watched: others may allocate pinned memory meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                value = call()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return Captured(graph, lent(value))

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose call raised. Its pool may be in any state: later captures get another. One that the
        driver has given up already cannot be ended: its pool is closed by hand."""
        self.broken.append(graph)
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        self.pool = torch.cuda.graph_pool_handle()


PLUGIN = Cuda
