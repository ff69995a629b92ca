"""What the loader sees of a layer: which tensors it wants, and where to put them.

Modules that hold weights are Parts; a merged weight wants several tensors, each under a name of its own
("0.weight", "1.weight"). Weights are plain tensors, not parameters: nothing is trained here.
"""

from __future__ import annotations

from torch import Tensor, nn


class Part(nn.Module):
    """A layer with weights."""

    takes_blocks = (
        False  # whether it takes rows as a GGUF file has them (kernels.native.blocks), where it has any
    )

    def wants(self) -> dict[str, tuple[int, ...]]:
        """Tensors by name, and their shapes."""
        raise NotImplementedError

    def put(self, name: str, tensor: Tensor) -> None:
        """One of them, as the checkpoint has it."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last one."""
