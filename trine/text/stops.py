"""Stop strings in a text that comes in pieces.

The stop that is complete first ends the text; of several that end with the same character, the
longest. So the result does not depend on how the text was cut, and no character after a stop, or
of one, is ever given out. Held back is the longest end of the text that begins a stop, no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Stops:
    """Watches one text for any of `strings`.

    A state is a node of the tree of all stops' beginnings; `_depth` says how many characters at
    the end of the text it stands for."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._hit: list[str | None] = [None]
        self._fall = [0]  # the state of the longest shorter end that also begins a stop
        for string in filter(None, strings):
            self._add(string)
        self._link()
        self._state = 0
        self._held = ""
        self._done = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """(what may be shown, the stop that was found). After a stop nothing more is shown."""
        if self._done:
            return "", None
        text, before = self._held + text, len(self._held)
        state = self._state
        for position in range(before, len(text)):
            state = self._step(state, text[position])
            if (hit := self._hit[state]) is not None:
                self._done, self._held = True, ""
                return text[: position + 1 - len(hit)], hit
        self._state = state
        shown = len(text) - self._depth[state]
        self._held = text[shown:]
        return text[:shown], None

    def close(self) -> str:
        """What was held back, when the text ends without a stop."""
        held, self._held, self._done = self._held, "", True
        return held

    def _step(self, state: int, letter: str) -> int:
        while letter not in self._next[state]:
            if not state:
                return 0
            state = self._fall[state]
        return self._next[state][letter]

    def _add(self, string: str) -> None:
        state = 0
        for depth, letter in enumerate(string, 1):
            if letter not in self._next[state]:
                self._next[state][letter] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._hit.append(None)
                self._fall.append(0)
            state = self._next[state][letter]
        self._hit[state] = string

    def _link(self) -> None:
        """Find each state's fall, the nearest to the root first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for letter, child in self._next[state].items():
                self._fall[child] = self._step(self._fall[state], letter)
                if self._hit[child] is None:
                    self._hit[child] = self._hit[self._fall[child]]
                queue.append(child)
