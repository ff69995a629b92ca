"""How byte-level vocabularies cut text before merging, by the name that a GGUF file gives it.

A GGUF file carries tokens and merges but not the expressions that cut: it names them in
`tokenizer.ggml.pre`. The expressions are facts of the models' own tokenizer.json files; the
names are those of https://github.com/ggml-org/llama.cpp (src/llama-vocab.cpp). Each expression
cuts what the one before left; what it does not match stays as a piece.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import Unsupported


class Cut(NamedTuple):
    """One way to cut, and what goes with it."""

    expressions: tuple[str, ...]
    whole: bool = False  # a piece that is a token is one, whatever the merges say
    bos: bool = False  # a text starts with the begin token unless the file says otherwise
    compose: bool = False  # text is brought to normal form C first, as the models' tokenizer.json does


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + TAIL
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = (
    rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"{START}{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"{START}{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

PLAIN = Cut((GPT2,))
DIGITS = Cut((r"\p{N}", GPT2))
LLAMA = Cut((LLAMA3,), whole=True, bos=True)

CUTS = {
    "default": Cut(DEFAULT),
    "gpt-2": PLAIN,
    "phi-2": PLAIN,
    "mpt": PLAIN,
    "olmo": PLAIN,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "codeshell": DIGITS,
    "exaone": DIGITS,
    "llama-bpe": LLAMA,
    "llama3": LLAMA,
    "llama-v3": LLAMA,
    "falcon3": LLAMA,
    "dbrx": Cut((LLAMA3,)),
    "smaug-bpe": Cut((LLAMA3,)),
    "qwen2": Cut((QWEN2,), compose=True),
    "stablelm2": Cut((QWEN2,)),
    "deepseek-r1-qwen": Cut((QWEN2,)),
    "megrez": Cut((QWEN2,)),
    "deepseek-coder": Cut(DEEPSEEK_CODER),
    "deepseek-v3": Cut(DEEPSEEK3),
    "tekken": Cut((TEKKEN,), whole=True, bos=True),
    "gpt-4o": Cut((GPT4O,)),
}


def cut(name: str) -> Cut:
    """The cut called `name`; Unsupported lists those there are."""
    if name not in CUTS:
        raise Unsupported(
            f"the file's tokenizer cuts text in a way called {name!r}, which is not known; known are: "
            + ", ".join(sorted(CUTS))
        )
    return CUTS[name]
