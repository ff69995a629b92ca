"""Bytes as people write them: read from "8GiB", and shown."""

from __future__ import annotations

import re

from .errors import ConfigError


def size(text: str, field: str) -> int:
    """Bytes of "8GiB", "500MB", "2g" or a plain number; ConfigError names `field`."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise ConfigError(f"{field}: a size such as 8GiB or 500MB is wanted, found {text!r}", field)
    number, unit, binary = found.groups()
    base = 1000 if unit and not binary and text.lower().rstrip().endswith("b") else 1024
    return int(float(number) * base ** " kmgt".index(unit or " "))


def human(count: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
