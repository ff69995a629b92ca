"""What a load is made of: conversations of prompts, seeded, or read from a file.

A conversation is a list of turns; most have one. Texts are plain words, so that any server
with any tokenizer can be driven; lengths are in words of about 1.3 tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from trine.errors import ConfigError

SYLLABLES = [
    "ba",
    "be",
    "bi",
    "bo",
    "bu",
    "da",
    "de",
    "di",
    "do",
    "du",
    "ka",
    "ke",
    "ki",
    "ko",
    "ku",
    "la",
    "le",
    "li",
    "lo",
    "lu",
    "ma",
    "me",
    "mi",
    "mo",
    "mu",
    "na",
    "ne",
    "ni",
    "no",
    "nu",
    "ra",
    "re",
    "ri",
    "ro",
    "ru",
    "sa",
    "se",
    "si",
    "so",
    "su",
    "ta",
    "te",
    "ti",
    "to",
    "tu",
]
LINE_BYTES = 8 * 1024 * 1024  # of a JSONL file


class Turn(Struct, frozen=True):
    """What a user says next, and how many tokens are wanted back."""

    text: str
    output: int


def words(count: int, rng: random.Random) -> str:
    """`count` made-up words, no two texts of two seeds alike."""
    return " ".join("".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(count))


def unique(requests: int, input_words: int, output: int, rng: random.Random) -> list[list[Turn]]:
    """Prompts that share nothing; lengths within half and one and a half of what is asked."""
    return [
        [
            Turn(
                words(max(1, round(input_words * rng.uniform(0.5, 1.5))), rng),
                max(1, round(output * rng.uniform(0.5, 1.5))),
            )
        ]
        for _ in range(requests)
    ]


def shared_prefix(
    requests: int, input_words: int, output: int, rng: random.Random, groups: int = 4
) -> list[list[Turn]]:
    """Prompts in `groups` groups; those of a group share their first seven eighths."""
    stems = [words(input_words * 7 // 8, rng) for _ in range(groups)]
    return [
        [Turn(f"{rng.choice(stems)} {words(max(1, input_words // 8), rng)}", output)] for _ in range(requests)
    ]


def multi_turn(
    requests: int, input_words: int, output: int, rng: random.Random, turns: int = 4
) -> list[list[Turn]]:
    """Conversations of `turns` turns; `requests` counts turns."""
    return [
        [Turn(words(input_words, rng), output) for _ in range(turns)]
        for _ in range(max(1, requests // turns))
    ]


MADE = {"unique": unique, "random": unique, "shared-prefix": shared_prefix, "multi-turn": multi_turn}
DATASETS = (*MADE, "jsonl")


def jsonl(path: Path, requests: int, output: int) -> list[list[Turn]]:
    """One conversation a line: {"prompt": text, "output": n} or {"messages": [{"role", "content"}]}.

    Of messages, the user's turns are taken: the server writes its own answers."""
    found = [_conversation(path, number, line, output) for number, line in enumerate(_lines(path), 1)]
    if not found:
        raise ConfigError(f"--dataset-path {path}: no conversations in it", "dataset_path")
    return [found[i % len(found)] for i in range(requests)]


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while line := file.readline(LINE_BYTES):
                if line.strip():
                    yield line
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}", "dataset_path") from None


def _conversation(path: Path, number: int, line: str, output: int) -> list[Turn]:
    try:
        value = json.loads(line)
        wanted = int(value.get("output", value.get("max_tokens", output)))
        if "prompt" in value:
            return [Turn(str(value["prompt"]), wanted)]
        turns = [Turn(str(m["content"]), wanted) for m in value["messages"] if m["role"] == "user"]
    except (ValueError, KeyError, TypeError, AttributeError):
        turns = []
    if not turns:
        raise ConfigError(
            f'{path}:{number}: wanted {{"prompt": text}} or {{"messages": [...]}} with a user turn',
            "dataset_path",
        )
    return turns


def build(
    name: str, requests: int, input_words: int, output: int, seed: int, path: Path | None
) -> list[list[Turn]]:
    """The conversations of dataset `name`; ConfigError lists the names."""
    rng = random.Random(seed)
    if name in MADE:
        return MADE[name](requests, input_words, output, rng)
    if name != "jsonl":
        raise ConfigError(f"no dataset is called {name!r}; there are: {', '.join(DATASETS)}", "dataset")
    if path is None:
        raise ConfigError("--dataset jsonl needs --dataset-path FILE", "dataset_path")
    return jsonl(path, requests, output)
