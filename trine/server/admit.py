"""Admission (rule S2): raw bytes of a body to a checked struct, or a Refusal that names the field.

JSON is read strictly: UTF-8, no key twice, no NaN or 1e999, no half surrogates, bounded depth
and number of values, counted before they are built. Fields the schema does not know are
refused by name. Nothing here knows which dialect is spoken.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from . import limits
from .catalogue import Refusal, name

Schema = TypeVar("Schema", bound=msgspec.Struct)

STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # may be half of a surrogate pair
PLACE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*?)`)?", re.DOTALL)
RANGE = re.compile(r"Expected `(\w+)` (?:of length )?(<=|>=|<|>) (-?[\d.]+)")
TYPE = re.compile(r"Expected `([\w| ]+)`(?:, got `(\w+)`)?")
MISSING = re.compile(r"Object missing required field `(\w+)`")
UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
CONTAINERS = (list, dict)
SIZES = {"str": " characters", "array": " items", "object": " entries"}


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object that `raw` is."""
    measure(raw)
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_once, parse_float=_finite, parse_constant=_constant
        )
    except RecursionError:
        raise Refusal("json_too_deep", limit=limits.JSON_DEPTH) from None
    except json.JSONDecodeError:
        raise Refusal("invalid_json") from None
    except UnicodeDecodeError:
        raise Refusal("invalid_json") from None
    except ValueError:  # an integer of more than 4,300 digits
        raise Refusal("invalid_number") from None
    if depth(value) > limits.JSON_DEPTH:
        raise Refusal("json_too_deep", limit=limits.JSON_DEPTH)
    if HALF.search(raw) and any(not _whole(text) for text in strings(value)):
        raise Refusal("invalid_text")
    if not isinstance(value, dict):
        raise Refusal("not_an_object")
    return value


def measure(raw: bytes) -> None:
    """Refuse a body of so many values that reading it would hold up everybody else."""
    if _few(raw):
        return
    # Commas and brackets inside texts do not count, and finding the texts must be cheap as well.
    if raw.count(b'"') > 2 * limits.JSON_STRINGS or not _few(STRING.sub(b'""', raw)):
        raise Refusal("json_too_large", limit=limits.JSON_ITEMS)


def _few(raw: bytes) -> bool:
    brackets = raw.count(b"[") + raw.count(b"{")
    return raw.count(b",") <= limits.JSON_ITEMS and brackets <= limits.JSON_BRACKETS


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refusal("duplicate_key")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Refusal("invalid_number")
    return number + 0.0  # -0.0 becomes 0.0


def _constant(word: str) -> float:
    raise Refusal("invalid_number")


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def depth(value: Any) -> int:
    """How many containers are inside each other."""
    level, found = [value] if type(value) in CONTAINERS else [], 0
    while level and found <= limits.JSON_DEPTH:
        found += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in CONTAINERS
        ]
    return found


def strings(value: Any) -> Iterator[str]:
    """Every text inside a value, keys as well. The depth was checked before."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def fields(
    data: dict[str, Any],
    schema: type[Schema],
    *,
    unsupported: Mapping[str, tuple[Any, ...]] = {},
    ignored: frozenset[str] = frozenset(),
) -> tuple[Schema, tuple[str, ...]]:
    """The struct that `data` is, and the ignored fields that were in it.

    `unsupported`: fields whose effect is missing, with the values that ask for no effect."""
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    taken: dict[str, Any] = {}
    passed: list[str] = []
    for field, value in data.items():
        if field in known:
            taken[field] = value
        elif field in unsupported:
            if value is not None and not any(_same(value, none) for none in unsupported[field]):
                raise Refusal("unsupported_field", field)
        elif field in ignored:
            passed.append(field)
        else:
            raise _unknown(field, [*known, *unsupported, *ignored])
    return convert(taken, schema), tuple(passed)


def _same(value: Any, other: Any) -> bool:
    """Equal and of one type: True is not 1."""
    return type(value) is type(other) and value == other


def _unknown(field: str, known: list[str]) -> Refusal:
    near = difflib.get_close_matches(field[:64], known, n=1, cutoff=0.75)
    return Refusal("misspelled_field", field, near=near[0]) if near else Refusal("unknown_field", field)


def convert(data: Any, schema: type[Schema]) -> Schema:
    """`data` as a struct; a Refusal says which field is wrong and what it must be."""
    try:
        found = msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    for field, value in _floats(found):
        if value and abs(value) < limits.SMALLEST:
            raise Refusal("invalid_value", field, wanted=f"0 or at least {limits.SMALLEST:g} in size")
    return found


def _floats(found: msgspec.Struct) -> Iterator[tuple[str, float]]:
    for field in found.__struct_fields__:
        value = getattr(found, field)
        if isinstance(value, float):
            yield field, value


def explain(text: str) -> Refusal:
    """What msgspec says is wrong, in the catalogue's words; nothing of the client's values is kept."""
    found = PLACE.fullmatch(text)
    what, place = (found.group(1), found.group(2) or "") if found else (text, "")
    field = place or "body"
    if match := MISSING.fullmatch(what):
        return Refusal("missing_field", _inside(place, match.group(1)))
    if match := UNKNOWN.fullmatch(what):
        return Refusal("unknown_field", _inside(place, match.group(1)))
    if match := RANGE.match(what):
        kind, sign, number = match.groups()
        size = SIZES.get(kind, "")
        return Refusal("invalid_value", field, wanted=f"{BOUNDS[sign]} {number.removesuffix('.0')}{size}")
    if match := TYPE.match(what):
        wanted, got = match.group(1).replace(" |", ",").replace(", null", ""), match.group(2)
        return Refusal("invalid_type", field, wanted=f"of type {wanted}", got=got or "this")
    return Refusal("invalid_value", field, wanted="one of the values that /openapi.json lists")


def _inside(place: str, field: str) -> str:
    return f"{place}.{name(field)}" if place else name(field)


def token_ids(ids: list[int], vocab: int, field: str) -> list[int]:
    """`ids`, every one inside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        place = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
        raise Refusal("invalid_token", f"{field}[{place}]", last=vocab - 1)
    return ids
