"""One choice of an answer: token ids in, text out, with stop strings and logprobs.

A token's logprob is shown when its text is: so what is held back for a stop string, and then
cut, is in neither, and the tokens of an answer join to its text. Knows nothing of engines.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from trine.core.types import Logprob, Output

from .ask import Delta, Token


class Detokenizer(Protocol):
    def feed(self, ids: list[int]) -> str: ...
    def close(self) -> str: ...


class Stops(Protocol):
    def feed(self, text: str) -> tuple[str, str | None]: ...
    def close(self) -> str: ...


class Choice:
    """Feed it Outputs in order; it says what of them the client sees."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: Stops | None, *, min_tokens: int, logprobs: bool
    ) -> None:
        self.index = index
        self.count = 0  # tokens, to the one that ended it
        self.finished: str | None = None
        self.detokenizer, self.stops = detokenizer, stops
        self.min_tokens, self.logprobs = min_tokens, logprobs
        self.length = 0  # characters of text so far
        self.shown = 0  # of those, what the client was given
        self.waiting: deque[Token] = deque()  # their text is not shown yet

    def feed(self, output: Output) -> Delta:
        """What is new for the client. `finished` is set on the Delta that ends the choice."""
        delta = Delta(self.index)
        last = len(output.tokens) - 1
        for place, token in enumerate(output.tokens):
            self.count += 1
            if place == last and output.finished == "stop":
                break  # a stop id: counted, not shown
            if self.logprobs and output.logprobs:
                self.waiting.append(Token(token, self.length, output.logprobs[place]))
            if self._show(self.detokenizer.feed([token]), delta):
                return self._end("stop", delta)
        if output.finished in ("stop", "length"):
            hit = self._show(self.detokenizer.close(), delta)
            if not hit:
                self._give(self.stops.close() if self.stops else "", delta)
                delta.tokens.extend(self.waiting)  # those without text of their own
            self._end("stop" if hit else output.finished, delta)
        return delta

    def _show(self, text: str, delta: Delta) -> bool:
        """Give the client what can be shown; True when a stop string is complete."""
        self.length += len(text)
        if self.stops is None or self.count < self.min_tokens:
            self._give(text, delta)
            return False
        text, hit = self.stops.feed(text)
        self._give(text, delta)
        return hit is not None

    def _give(self, text: str, delta: Delta) -> None:
        delta.text += text
        self.shown += len(text)
        while self.waiting and self.waiting[0].start < self.shown:
            delta.tokens.append(self.waiting.popleft())

    def _end(self, reason: str, delta: Delta) -> Delta:
        self.finished = delta.finished = reason
        self.waiting.clear()
        return delta


def merge(earlier: Delta, later: Delta) -> None:
    """Add what came later of one choice to what was not read yet."""
    earlier.text += later.text
    earlier.tokens.extend(later.tokens)
    earlier.finished = later.finished


__all__ = ["Choice", "Logprob", "merge"]
