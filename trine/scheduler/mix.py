"""How much of a prompt rides in one step with rows of one token, so that those rows do not wait for it.

A step of rows alone takes as long as reading the weights once; `ridge` tokens take that long to
compute. With one prompt beside them a step may take twice as long, with two three times: who sends
prompts pays for each in proportion, and many prompts at once still fill the budget. It knows no
clock and no device: the two numbers of the machine are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class Mix:
    """Work is counted in tokens at position 0."""

    ridge: int  # tokens whose arithmetic takes as long as reading the weights once
    reach: float = 0.0  # what a token costs more for each position that it attends to
    least: int = 16  # tokens of a chunk: below that a step is not worth its launch

    def cost(self, start: int, count: int) -> float:
        """Work of a chunk of `count` tokens at position `start`: each attends to half the chunk too."""
        return count * (1.0 + self.reach * (start + count / 2))

    def chunk(self, work: float, start: int) -> int:
        """The longest chunk at position `start` that costs at most `work`."""
        if work <= 0.0:
            return 0
        each = 1.0 + self.reach * start
        return int(2.0 * work / (each + sqrt(each * each + 2.0 * self.reach * work)))
