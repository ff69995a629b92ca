"""A CPU: cores, memory, and which instructions it has.

Limits of a container (cgroup 1 and 2) count, so that a plan fits where it runs. Facts are read from the
files of Linux where there are any; elsewhere little is claimed.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from .base import Facts

# What kernels ask about -> how /proc/cpuinfo says it.
FEATURES = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "amx": ("amx_int8",),
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "dot": ("asimddp",),
    "i8mm": ("i8mm",),
}
# Of both versions of cgroup: the limit and what is used of it.
LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Cpu:
    """The machine every other one has inside."""

    name = "cpu"
    order = 100
    asynchronous = False

    @classmethod
    def cannot(cls) -> str | None:
        return None

    def device(self, rank: int = 0) -> torch.device:
        return torch.device("cpu")

    def facts(self) -> Facts:
        text = _read("/proc/cpuinfo")
        flags = set(_field(text, "flags").split()) | set(_field(text, "Features").split())
        return Facts(
            kind="cpu",
            chip=_field(text, "model name") or platform.processor() or platform.machine(),
            cores=_cores(),
            memory=self.memory()[1],
            features=tuple(name for name, words in FEATURES.items() if flags.intersection(words)),
        )

    def memory(self) -> tuple[int, int]:
        text = _read("/proc/meminfo")
        total, free = _kib(text, "MemTotal"), _kib(text, "MemAvailable")
        if not total:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            free = total // 2  # nothing says how much is in use
        for limit, used in LIMITS:
            if (most := _read(limit).strip()).isdigit() and int(most) < total:
                total = int(most)
                free = min(free, max(0, total - int(_read(used).strip() or 0)))
        return free, total

    def threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def event(self) -> Event:
        return Event()

    def stream(self) -> Stream:
        return Stream()

    def synchronize(self) -> None:
        pass

    def graph(self) -> None:
        return None

    def collectives(self) -> str:
        return "gloo"


class Event:
    """Orders are done when they return, so an event is done when it is recorded."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def since(self, earlier: Event) -> float:
        return self.at - earlier.at


class Stream:
    """There is only one line of orders."""

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass


def _cores() -> int:
    """That the scheduler lets us use, and that the container pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _read(path: str) -> str:
    """Empty where there is no such file: what it would say is then not known."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """The value of the first line `name : value`."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def _kib(text: str, name: str) -> int:
    value = _field(text, name).removesuffix("kB").strip()
    return int(value) * 1024 if value.isdigit() else 0


PLUGIN = Cpu
