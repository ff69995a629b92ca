"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field

import tokenizers


@dataclass(slots=True, kw_only=True)
class Parts:
    """Read by `folder` and `vocabulary`; made into one thing by `tokenizer`."""

    core: tokenizers.Tokenizer
    vocab: int  # ids are below this
    longest: int  # characters of text that one token can stand for, at most
    bos: int | None = None
    eos: tuple[int, ...] = ()  # every id that ends a text
    prefix: tuple[int, ...] = ()  # ids a plain text starts with
    suffix: tuple[int, ...] = ()  # and ends with
    words: dict[str, str] = field(default_factory=dict)  # bos_token and the like: their text, for templates
    templates: dict[str, str] = field(default_factory=dict)  # chat templates by name; "default" is the usual
