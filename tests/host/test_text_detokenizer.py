"""Text a few tokens at a time: the pieces join to the whole, and none holds half of a character."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import text as kit
from trine.text.detokenizer import Detokenizer
from trine.text.spelling import byte_letters
from trine.text.tokenizer import Tokenizer
from trine.text.vocabulary import from_metadata

KINDS = ["bytes", "pieces"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(
        from_metadata(kit.byte_metadata("smollm") if kind == "bytes" else kit.sentence_metadata())
    )


def pieces(kind: str, ids: list[int], sizes: list[int], **options: bool) -> list[str]:
    detokenizer, out, at = Detokenizer(tokenizer(kind), **options), [], 0
    for size in [*sizes, len(ids)]:
        out.append(detokenizer.feed(ids[at : at + size]))
        at += size
    return [*out, detokenizer.close()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_texts_one_token_a_step(kind: str) -> None:
    for text in kit.texts(1000, seed=5):
        ids = tokenizer(kind).encode(text)
        deltas = pieces(kind, ids, [1] * len(ids))
        assert (
            "".join(deltas)
            == tokenizer(kind).decode(ids)
            == text.replace("▁", "▁" if kind == "bytes" else " ")
        )
        assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_chunks_join_to_the_whole(kind: str, data: st.DataObject) -> None:
    count = tokenizer(kind).vocab
    ids = data.draw(st.lists(st.integers(-1, count), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=40))
    skip = data.draw(st.booleans())
    whole = tokenizer(kind).decode(ids, skip_special=skip)
    assert "".join(pieces(kind, ids, sizes, skip_special=skip)) == whole
    raw = b"".join(
        tokenizer(kind).token_bytes(i) for i in ids if not skip or i not in tokenizer(kind).special
    )
    plain = raw.decode("utf-8", "replace")
    assert whole == (plain.removeprefix(" ") if kind == "pieces" else plain)


def test_what_is_held_is_less_than_a_character() -> None:
    """After each token, what was given out is all the whole characters there are."""
    text = "a😀é漢\u0301"
    detokenizer, raw, out = Detokenizer(tokenizer("bytes")), b"", ""
    for number in byte_ids(text.encode()):
        raw += tokenizer("bytes").token_bytes(number)
        out += detokenizer.feed([number])
        assert out == raw.decode("utf-8", "ignore")
    assert out == text


def byte_ids(raw: bytes) -> list[int]:
    """A token for each byte."""
    tokens = kit.byte_metadata("smollm")["tokenizer.ggml.tokens"]
    letters = {byte: letter for letter, byte in byte_letters().items()}
    return [tokens.index(letters[byte]) for byte in raw]


def test_ids_that_are_never_text_cost_no_more_than_others() -> None:
    """The work is linear: each id's bytes are looked at once, and at most three are held."""
    rng = random.Random(0)
    bad = byte_ids(bytes(range(0x80, 0x100)))
    ids = [rng.choice(bad) for _ in range(100_000)]
    detokenizer = Detokenizer(tokenizer("bytes"))
    out, most = [], 0
    for number in ids:
        out.append(detokenizer.feed([number]))
        most = max(most, len(detokenizer._utf8.getstate()[0]))
    assert "".join(out) + detokenizer.close() == tokenizer("bytes").decode(ids)
    assert most <= 3


def test_an_unfinished_character_is_told_at_the_end_and_not_before() -> None:
    ids = byte_ids("😀".encode()[:3])
    detokenizer = Detokenizer(tokenizer("bytes"))
    assert [detokenizer.feed([number]) for number in ids] == ["", "", ""]
    assert detokenizer.close() == "\ufffd"


def test_the_first_space_of_pieces() -> None:
    ids = tokenizer("pieces").encode("the fox")
    assert tokenizer("pieces").decode(ids) == "the fox"
    detokenizer = Detokenizer(tokenizer("pieces"), continues=True)
    assert detokenizer.feed(ids) == " the fox"


def test_special_tokens_are_left_out_or_shown() -> None:
    ids = tokenizer("bytes").encode("a<|im_end|>b", special=True)
    assert tokenizer("bytes").decode(ids) == "ab"
    assert tokenizer("bytes").decode(ids, skip_special=False) == "a<|im_end|>b"
