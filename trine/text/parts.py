"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import tokenizers

from ..errors import CheckpointError

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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


def template_name(name: object, where: str) -> str:
    """The name of a chat template, which must look like one; CheckpointError for a path and the like."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CheckpointError(f"{where}: a chat template is called {name!r:.80}, which is not a name")
    return name
