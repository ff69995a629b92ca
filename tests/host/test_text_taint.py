"""Text with a record of trust: the same characters as str gives, and trust that follows each of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.sandbox.taint import Text, joined, ranges, trusted

OURS, THEIRS = "ABC \n|%", "abc"  # letters of the template, letters of the client
PIECES = st.lists(
    st.one_of(st.text(OURS, max_size=4).map(lambda t: (t, True)), st.text(THEIRS, max_size=4).map(lambda t: (t, False))),
    max_size=5,
)  # fmt: skip
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "strip": lambda t: t.strip(),
    "strip letters": lambda t: t.strip("Aa "),
    "lstrip": lambda t: t.lstrip(),
    "rstrip": lambda t: t.rstrip("\n"),
    "split": lambda t: t.split(),
    "split at": lambda t: t.split("|"),
    "split once": lambda t: t.split(None, 1),
    "rsplit": lambda t: t.rsplit("|", 1),
    "rsplit spaces": lambda t: t.rsplit(None, 1),
    "lines": lambda t: t.splitlines(),
    "lines with ends": lambda t: t.splitlines(True),
    "slice": lambda t: t[2:-1],
    "slice from the end": lambda t: t[-4:],
    "empty slice": lambda t: t[5:2],
    "letter": lambda t: [t[i] for i in range(-len(t), len(t))],
    "prefix": lambda t: t.removeprefix("A"),
    "suffix": lambda t: t.removesuffix("a"),
    "no suffix": lambda t: t.removesuffix(""),
    "replace": lambda t: t.replace("A", "b"),
    "replace once": lambda t: t.replace("ab", "", 1),
    "replace none": lambda t: t.replace("a", "b", 0),
    "twice": lambda t: t * 2,
    "times": lambda t: 3 * t,
    "never": lambda t: t * -1,
    "add": lambda t: t + "abc",
    "add before": lambda t: "abc" + t,
    "join": lambda t: t.join(["a", "b", "c"]),
    "join nothing": lambda t: t.join([]),
    "join one": lambda t: t.join(["a"]),
    "str": lambda t: str(t),
}


def build(pieces: list[tuple[str, bool]]) -> Text:
    return joined([trusted(text) if trust else text for text, trust in pieces])


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=12, deadline=None)
@given(pieces=PIECES)
def test_an_operation_gives_what_str_gives_and_trust_follows(
    name: str, pieces: list[tuple[str, bool]]
) -> None:
    text = build(pieces)
    wanted, found = OPERATIONS[name](str.__str__(text)), OPERATIONS[name](text)
    assert found == wanted
    for part in found if isinstance(found, list) else [found]:
        follows(part)


def follows(text: str) -> None:
    """Each letter of the template's is trusted, and no other; ranges are in order and apart."""
    spans = ranges(text)
    assert all(a < b for a, b in spans) and all(x[1] < y[0] for x, y in pairwise(spans))
    inside = {i for a, b in spans for i in range(a, b)}
    assert inside == {i for i, letter in enumerate(text) if letter in OURS}


@pytest.mark.parametrize(
    "form,values",
    [
        ("A%sB", "a"), ("%s", ("a",)), ("A%sB%s", ("a", "bc")), ("%(x)sA", {"x": "a"}), ("A%%%s", ("a",)), ("100%%", ()),
        ("%5d|%-4s|%.2f", (1, "a", 2.5)), ("%*d", (5, 1)), ("%r %c %x", ("a", "b", 255)), ("A %i%%", (3,)), ("%s", [1]),
        ("%(a)s%(b)05d", {"a": "x", "b": 7}), ("%ld", (1,)),
    ],
)  # fmt: skip
def test_a_form_is_filled_as_str_fills_it(form: str, values: Any) -> None:
    found = trusted(form) % values
    assert found == form % values
    parts = (
        values.values()
        if isinstance(values, dict)
        else values
        if isinstance(values, tuple | list)
        else (values,)
    )
    for word in (str(value) for value in parts):
        at = found.find(word)
        assert not any(a <= at < b for a, b in ranges(found)) or word not in found


def test_a_trusted_value_stays_trusted_in_a_form() -> None:
    assert ranges(trusted("A%sB") % trusted("C")) == ((0, 3),)
    assert ranges(trusted("A%5sB") % trusted("C")) == ((0, 1), (6, 7))  # a padded one is not
    with pytest.raises(TypeError):
        trusted("%s%s") % "a"
    with pytest.raises(TypeError):
        trusted("A") % "a"


def test_case_changes_keep_trust_unless_letters_become_several() -> None:
    text = joined([trusted("<a>"), "b", trusted("<c>")])
    for change in (str.upper, str.lower, str.title, str.capitalize):
        changed = getattr(text, change.__name__)()
        assert changed == change(str.__str__(text)) and ranges(changed) == ((0, 3), (4, 7))
    grown = joined(["ß", trusted("<A>")]).upper()
    assert (grown, ranges(grown)) == ("SS<A>", ())


def test_what_is_not_written_here_is_not_trusted() -> None:
    text = trusted("ABC")
    for plain in (
        text[::-1], text.center(9), text.zfill(9), text.swapcase(), text.casefold(), text.expandtabs(), text.partition("B")[0],
        text.translate({}), "".join([text]), "|".join([text, text]), "a".replace("a", text), Text(text),
        text.replace("", "x"), *text,
    ):  # fmt: skip
        assert ranges(plain) == (), plain


def test_text_is_a_str_in_every_test() -> None:
    text = joined(["a", trusted("B")])
    assert text == "aB" and hash(text) == hash("aB") and {"aB": 1}[text] == 1 and "B" in text
    assert text.startswith("a") and text.endswith("B") and text.count("B") == 1 and len(text) == 2
    with pytest.raises(TypeError):
        _ = text + 1  # type: ignore[operator]
    with pytest.raises(IndexError):
        _ = text[2]
    with pytest.raises(TypeError):
        text.join([1])  # type: ignore[list-item]
