"""Which bytes each token stands for.

Three ways that tokens are written: byte-level (a letter for each byte), pieces (a mark for the
space, `<0x0A>` for a byte), and added tokens (as they read). Knows only the vocabulary and the
kind of its decoder.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from tokenizers import Tokenizer

from ..errors import Unsupported

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Spelling:
    """The bytes of each token of one vocabulary, worked out when first asked for."""

    def __init__(self, core: Tokenizer, *, letters: bool, strips: bool) -> None:
        self._core = core
        self._letters = byte_letters() if letters else None
        self._added = core.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}
        self.strips = strips  # the first token's space is not part of the text

    @classmethod
    def of(cls, core: Tokenizer) -> Spelling:
        """The spelling that a tokenizer's decoder undoes; Unsupported for another kind."""
        state: dict[str, Any] = msgspec.json.decode(core.decoder.__getstate__()) if core.decoder else {}
        kinds: dict[str, Any] = {step.get("type", "none"): step for step in state.get("decoders", [state])}
        if "ByteLevel" in kinds:
            return cls(core, letters=True, strips=False)
        if "ByteFallback" in kinds or "Metaspace" in kinds:
            return cls(core, letters=False, strips=strips(kinds))
        raise Unsupported(
            f"the tokenizer's decoder is {' + '.join(kinds)}; known are ByteLevel, ByteFallback, Metaspace"
        )

    def bytes(self, number: int) -> bytes:
        """The bytes of a token; none for an id that is no token."""
        if (found := self._known.get(number)) is None:
            found = self._known[number] = self._spell(number)
        return found

    def _spell(self, number: int) -> bytes:
        if (token := self._added.get(number)) is not None:
            return (
                token.content.replace(SPACE, " ").encode()
                if self._letters is None
                else token.content.encode()
            )
        if number < 0 or (text := self._core.id_to_token(number)) is None:
            return b""
        if self._letters is None:
            if found := BYTE.fullmatch(text):
                return bytes([int(found[1], 16)])
            return text.replace(SPACE, " ").encode()
        letters = [self._letters.get(letter, -1) for letter in text]
        return text.encode() if -1 in letters else bytes(letters)


def strips(kinds: dict[str, Any]) -> bool:
    """Whether a decoder takes the first space away."""
    if "Metaspace" in kinds:
        return kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    return kinds.get("Strip", {}).get("start", 0) > 0


def byte_letters() -> dict[str, int]:
    """The letter of each byte in byte-level vocabularies: itself where it can be seen, else the
    next free one from U+0100. A fact of GPT-2's format that all of them share."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
