"""The contract of a platform: the only place that knows the machine.

A platform knows devices, memory and what the processor can do. It does not know models, pages or plans.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from msgspec import Struct


class Facts(Struct, frozen=True):
    """What the machine is. Read once, at the start."""

    kind: str  # "cpu"
    chip: str  # as it names itself
    cores: int  # that this process may use
    memory: int  # bytes that this process may use in all
    features: tuple[str, ...] = ()  # of the processor that kernels ask about: "avx2", "vnni", "amx", ...


class Platform(Protocol):
    """One kind of machine."""

    name: str
    order: int  # tried from low to high; the CPU is last

    @classmethod
    def cannot(cls) -> str | None:
        """Why this machine is not of that kind; None if it is."""
        ...

    def device(self, rank: int = 0) -> torch.device: ...

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

    def graph(self) -> Any | None:
        """How to capture and replay a step; None: run eagerly."""
        ...

    def collectives(self) -> str:
        """The back end of torch.distributed for this kind."""
        ...
