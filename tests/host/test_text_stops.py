"""Stop strings: however the text is cut, the result is that of looking at the whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trine.text.stops import Stops

LETTERS = st.text("abc\n", max_size=40)
STRINGS = st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=5)


def reference(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The stop that is complete first, and the longest of those; what is before it."""
    for end in range(1, len(text) + 1):
        hits = [s for s in strings if text[:end].endswith(s)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


@settings(max_examples=200, deadline=None)
@given(text=LETTERS, strings=STRINGS, cuts=st.lists(st.integers(0, 6), max_size=40))
@example(text="abcd", strings=["abcd", "bc"], cuts=[])
@example(text="aab", strings=["aaab", "ab"], cuts=[1, 1, 1])
def test_any_text_any_stops_any_cuts(text: str, strings: list[str], cuts: list[int]) -> None:
    stops, shown, found, at = Stops(strings), "", None, 0
    for size in [*cuts, len(text)]:
        piece, hit = stops.feed(text[at : at + size])
        at += size
        shown += piece
        found = found or hit
        if not found:
            seen = text[:at]
            held = seen[len(shown) :]
            begun = [
                seen[i:]
                for i in range(len(seen))
                if any(s.startswith(seen[i:]) and s != seen[i:] for s in strings)
            ]
            assert held == max(begun, key=len, default="")
    shown += stops.close()
    assert (shown, found) == reference(text, strings)


def test_one_stop_is_what_find_finds() -> None:
    text = "one two stop three stop"
    assert Stops(["stop"]).feed(text) == (text[: text.find("stop")], "stop")


def test_after_a_stop_nothing_is_shown() -> None:
    stops = Stops(["END"])
    assert stops.feed("abcEN") == ("abc", None)
    assert stops.feed("D and more") == ("", "END")
    assert stops.feed("still more") == ("", None)
    assert stops.close() == ""


@pytest.mark.parametrize("strings", [[], [""]])
def test_no_stops_hold_nothing(strings: list[str]) -> None:
    stops = Stops(strings)
    assert stops.feed("anything") == ("anything", None)
    assert stops.close() == ""


def test_many_long_stops() -> None:
    strings = ["a" * 255 + chr(ord("b") + i) for i in range(16)]
    stops = Stops(strings)
    shown, hit = stops.feed("a" * 10_000)
    assert (len(shown), hit) == (10_000 - 255, None)
    assert stops.feed("c") == ("", strings[1])
