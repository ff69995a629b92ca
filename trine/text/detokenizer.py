"""Token ids to text, a few at a time.

Tokens are bytes, and a character may begin in one token and end in another: what is given out
ends with a whole character, and a byte that is no UTF-8 becomes U+FFFD as soon as that is sure,
never before. At most three bytes are held back, so the work is linear whatever the ids are.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing list of ids: what `feed` gives, joined, and then `close`.

    `continues`: the ids go on from an earlier text, so a first space is part of it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._bytes = tokenizer.token_bytes
        self._skip = tokenizer.special if skip_special else frozenset()
        self._strip = tokenizer.strips and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids add."""
        return self._start(self._utf8.decode(b"".join(self._bytes(i) for i in ids if i not in self._skip)))

    def close(self) -> str:
        """What was held back, at the end."""
        return self._start(self._utf8.decode(b"", final=True))

    def _start(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
