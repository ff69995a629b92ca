"""The doors to the files of a model: only names of a list, only plain files, only so much JSON.

A model folder comes from a stranger. Nothing in it is ever run: weights that are pickles and
configurations that name code of their own are refused in words.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError

JSON_BYTES = 4 * 2**20
JSON_DEPTH = 32
SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def open_regular(path: Path) -> BinaryIO:
    """Open a plain file of an allowed suffix for reading; never a pipe, a device or a folder."""
    if path.suffix.lower() not in SUFFIXES:
        allowed = ", ".join(SUFFIXES)
        raise CheckpointError(f"{path}: only files that end in {allowed} are opened in a model")
    try:
        # Without O_NONBLOCK the opening of a named pipe would wait for ever.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CheckpointError(f"{path}: is not a plain file")
    return open(number, "rb")


def read_json(path: Path, limit: int = JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes: no key twice, no NaN, not too deep."""
    with open_regular(path) as file:
        return parse_json(file.read(limit + 1), str(path), limit)


def parse_json(raw: bytes, path: str, limit: int) -> dict[str, Any]:
    """The object in `raw`; CheckpointError says what is wrong with it."""
    if len(raw) > limit:
        raise CheckpointError(f"{path}: has more than {limit} bytes of JSON")
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
        _check_depth(value, JSON_DEPTH)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise CheckpointError(f"{path}: is not the JSON that is wanted: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, an object is wanted")
    return value


def refuse_code(value: Any, path: Path | str) -> None:
    """CheckpointError if `auto_map` is anywhere in `value`: it names code to be run from the folder."""
    match value:
        case dict():
            if "auto_map" in value:
                raise CheckpointError(
                    f"{path}: has auto_map, which names Python code of the model's own. Trine never runs "
                    "code of a model: if the family is one it knows, remove the auto_map entry"
                )
            for inner in value.values():
                refuse_code(inner, path)
        case list():
            for inner in value:
                refuse_code(inner, path)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:100]!r} appears twice")
    return out


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _check_depth(value: Any, left: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not left:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value:
        _check_depth(inner, left - 1)
