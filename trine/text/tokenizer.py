"""Text to token ids and back, for one model.

    tokenizer = Tokenizer.open(Path("model.gguf"))
    tokenizer.encode_segments([("<|im_start|>user\\n", True), ("hello", False)])

The work is the `tokenizers` library's; here are the doors: where it is read from (`folder`,
`vocabulary`), what of a client's text may not become a control token (`guard`), which bytes each
token stands for, and what ends a text. It does not know of models, requests or templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import RequestError
from .detokenizer import Detokenizer
from .folder import from_folder
from .guard import Guard, Segments, encode
from .parts import Parts
from .spelling import Spelling
from .vocabulary import from_metadata


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(self, parts: Parts, chat_template: str | None = None) -> None:
        self._core = parts.core
        self._parts = parts
        self.templates = {"default": chat_template} if chat_template else parts.templates
        added = self._core.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        written = "\0".join(self.templates.values())
        control = {
            token.content: number
            for number, token in added.items()
            if token.content and (token.special or is_control(token.content, written))
        }
        self.control = frozenset(control.values())
        self._guard = Guard(self._core, control)
        self._spelling = Spelling.of(self._core)

    @classmethod
    def open(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer of a model folder or .gguf file; `chat_template` (its text) is used
        instead of the model's own."""
        if path.is_dir():
            return cls(from_folder(path), chat_template)
        from ..loader.header import read_safely

        return cls(from_metadata(read_safely(path).metadata), chat_template)

    @property
    def vocab(self) -> int:
        """Ids are below this."""
        return self._parts.vocab

    @property
    def longest(self) -> int:
        """Characters of text that one token can stand for, at most."""
        return self._parts.longest

    @property
    def bos(self) -> int | None:
        return self._parts.bos

    @property
    def eos(self) -> tuple[int, ...]:
        """Every id that ends a text."""
        return self._parts.eos

    @property
    def words(self) -> dict[str, str]:
        """The text of tokens with a role (`bos_token`, `eos_token`, ...), for chat templates."""
        return self._parts.words

    @property
    def chat_template(self) -> str | None:
        """The chat template that is used when no tools are given."""
        return self.templates.get("default")

    @property
    def strips(self) -> bool:
        """Whether the space that a text's first token stands for is not part of the text."""
        return self._spelling.strips

    def encode(
        self, text: str, special: bool = False, *, bos: bool = False, limit: int | None = None
    ) -> list[int]:
        """The ids of `text`.

        `special`: control tokens spelled in it become control tokens; never for what a client
        wrote. `bos`: with what the model wants before and after a plain text. `limit`: tokens
        there may be; a text that surely has more is refused before any work is done."""
        self._check(text, limit)
        ids = encode(self._core, text) if special else self._guard.encode([(text, False)])
        return [*self._parts.prefix, *ids, *self._parts.suffix] if bos else ids

    def encode_segments(self, segments: Segments, limit: int | None = None) -> list[int]:
        """The ids of (text, trusted) parts as one text; only trusted parts hold control tokens."""
        self._check("".join(text for text, _ in segments), limit)
        return self._guard.encode(segments)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.feed(ids) + detokenizer.close()

    def token_bytes(self, number: int) -> bytes:
        """The bytes that a token adds to a text; none for an id that is no token."""
        return self._spelling.bytes(number)

    def _check(self, text: str, limit: int | None) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("the text has half of a surrogate pair, which no UTF-8 has") from None
        if limit is not None and len(text) > (most := limit * self.longest):
            raise RequestError(
                f"the text has {len(text)} characters; {limit} tokens hold at most {most}: "
                f"it is too long by at least {len(text) - most} characters"
            )


def is_control(text: str, written: str) -> bool:
    """Whether an added token that is not marked special still steers the model: it looks like
    one that does, or the chat template writes it."""
    fenced = text.startswith(("<|", "<\N{FULLWIDTH VERTICAL LINE}")) and text.endswith(
        ("|>", "\N{FULLWIDTH VERTICAL LINE}>")
    )
    return fenced or (not text.isspace() and text in written)
