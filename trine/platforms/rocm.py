"""AMD GPUs: torch's ROCm build speaks of them as torch.cuda, and Triton compiles the same kernels for them."""

from __future__ import annotations

import torch

from .cuda import Cuda


class Rocm(Cuda):
    """Cuda but for its name and its torch."""

    name = "rocm"
    order = 20

    @classmethod
    def cannot(cls) -> str | None:
        if not torch.version.hip:
            return "this torch is built without ROCm"
        return cls._missing()


PLUGIN = Rocm
