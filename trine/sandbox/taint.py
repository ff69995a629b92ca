"""Text that knows which of its characters the template's author wrote.

`Text` is a str that carries ranges of trust. Everything else is not trusted: a plain str, and
what any operation returns that is not written here. So what is missing here can only make a
template's own text count as the client's, never the other way round (rule S12).

Knows nothing of jinja. Every operation gives the same characters as str's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, SupportsIndex

Ranges = tuple[tuple[int, int], ...]  # [start, end), in order, none touches the next
SPEC = re.compile(r"%(?:\((?P<key>[^)]*)\))?(?P<flags>[-#0 +]*)(?P<size>[*.\d]*)(?P<kind>[hlL]?.)", re.S)


class Text(str):
    """A str some of whose characters are trusted."""

    __slots__ = ("_trust",)
    _trust: Ranges

    def __new__(cls, text: str = "", trust: Ranges = ()) -> Text:
        self = super().__new__(cls, str.__str__(text))
        self._trust = trust
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented  # markup has its own rules
        return joined((self, other))

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        text = str.__mul__(self, count)
        if self._trust == ((0, len(self)),):
            return trusted(text)
        return joined([self] * count.__index__()) if self._trust else text

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def __mod__(self, values: Any) -> str:
        return formatted(self, values)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            start = key.__index__()
            return self._cut(start % len(self), start % len(self) + 1)
        start, stop, step = key.indices(len(self))
        return self._cut(start, max(start, stop)) if step == 1 else text

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self._cut(start, max(start, len(str.rstrip(self, chars))))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self) - (len(suffix) if self.endswith(suffix) else 0))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._find(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._find(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._find(str.splitlines(self, True), 0)
        if keepends:
            return lines
        return [line[: len(bare)] for line, bare in zip(lines, str.splitlines(self), strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        parts = self._find(str.split(self, old, count), len(old))
        return _text(new).join(parts)

    def join(self, parts: Iterable[str], /) -> str:
        parts = list(parts)
        str.join(self, parts)  # raises what str raises
        if not parts:
            return ""
        pieces: list[str] = [self] * (2 * len(parts) - 1)
        pieces[::2] = parts
        return joined(pieces)

    def upper(self) -> str:
        return self._same(str.upper(self))

    def lower(self) -> str:
        return self._same(str.lower(self))

    def title(self) -> str:
        return self._same(str.title(self))

    def capitalize(self) -> str:
        return self._same(str.capitalize(self))

    def _cut(self, start: int, stop: int) -> Text:
        """The characters from `start` to before `stop`, with their trust."""
        inside = ((max(a, start) - start, min(b, stop) - start) for a, b in self._trust)
        trust = tuple((a, b) for a, b in inside if a < b)
        return Text(str.__getitem__(self, slice(start, stop)), trust)

    def _find(self, parts: list[str], gap: int) -> list[str]:
        """`parts` of this text, in order and at least `gap` characters apart, with their trust."""
        found, position = [], 0
        for part in parts:
            position = self.index(part, position) if not gap else position
            found.append(self._cut(position, position + len(part)))
            position += len(part) + gap
        return found

    def _same(self, text: str) -> Text:
        """`text` with this one's trust when no character became several."""
        return Text(text, self._trust if len(text) == len(self) else ())


def trusted(text: str) -> Text:
    """All of `text`, trusted."""
    return Text(text, ((0, len(text)),) if text else ())


def ranges(text: str) -> Ranges:
    """The trusted ranges of any string."""
    return text._trust if isinstance(text, Text) else ()


def joined(pieces: Iterable[str]) -> Text:
    """The pieces one after the other, each with its trust."""
    pieces = list(pieces)
    trust: list[tuple[int, int]] = []
    offset = 0
    for piece in pieces:
        for start, stop in ranges(piece):
            if trust and trust[-1][1] == start + offset:
                trust[-1] = (trust[-1][0], stop + offset)
            else:
                trust.append((start + offset, stop + offset))
        offset += len(piece)
    return Text("".join(pieces), tuple(trust))


def formatted(form: Text, values: Any) -> str:
    """`form % values`: the form keeps its trust, `%s` keeps its value's, other values have none."""
    whole = str.__mod__(form, values)  # raises what str raises, and is what we must equal
    rest = list(values) if isinstance(values, tuple) else [values]
    pieces: list[str] = []
    position = 0
    for spec in SPEC.finditer(form):
        pieces.append(form[position : spec.start()])
        position = spec.end()
        if "*" in spec["size"]:
            return whole
        if spec["kind"] == "%":
            pieces.append(form[spec.start() : spec.start() + 1])
        elif spec["key"] is not None:
            pieces.append(_field(spec, rest[0][spec["key"]]))
        else:
            pieces.append(_field(spec, rest.pop(0)))
    text = joined([*pieces, form[position:]])
    return text if text == whole else whole


def _field(spec: re.Match[str], value: Any) -> str:
    if spec[0].endswith("s") and not spec["flags"] and not spec["size"]:
        return str(value)
    return f"%{spec['flags']}{spec['size']}{spec['kind']}" % (value,)


def _text(text: str) -> Text:
    return text if isinstance(text, Text) else Text(text)
