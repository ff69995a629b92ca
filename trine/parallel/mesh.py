"""The mesh: how the workers of one engine are laid out, as an object that is passed in.

Each axis has a rank, a size, and what its workers do together. An axis of size one does nothing, so code
is written once. It does not know what is divided: a layer says that with `split`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trine.errors import Unsupported


class Axis(NamedTuple):
    """Workers that share one kind of work."""

    name: str
    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of everyone's x."""
        return x if self.size == 1 else self._refuse()

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Everyone's x, side by side along `dim`."""
        return x if self.size == 1 else self._refuse()

    def share(self, size: int) -> range:
        """Which of `size` things are this worker's; they must divide evenly."""
        if size % self.size:
            raise Unsupported(f"{size} cannot be divided evenly over {self.size} workers ({self.name})")
        part = size // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def _refuse(self) -> Tensor:
        raise Unsupported(f"{self.name} over {self.size} workers: only one is supported")


class Mesh(NamedTuple):
    """All axes of one engine."""

    tensor: Axis = Axis("tensor")
    pipeline: Axis = Axis("pipeline")
    expert: Axis = Axis("expert")
    data: Axis = Axis("data")

    @property
    def size(self) -> int:
        return self.tensor.size * self.pipeline.size * self.data.size
