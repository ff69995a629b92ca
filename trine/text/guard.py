"""What a client writes never becomes a control token (rule S12).

Text comes with a record of which parts the template's author wrote. Most texts hold no control
token outside those parts, and are encoded as they are. When one does, the text is encoded by a
twin of the tokenizer that knows no control tokens but knows an alias of each, that no client can
guess; the aliases stand where the author wrote the real ones. So nothing else about the text is
cut differently. Whatever is encoded is checked: it holds exactly the control tokens it may.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

from ..errors import RequestError

Segments = list[tuple[str, bool]]
LETTER = re.compile(r"\w")
ROUNDS = 64  # more than any text needs to be cut until no control token is left


class Guard:
    """Encodes text of which only the trusted parts may hold the tokens `control` (text to id)."""

    def __init__(self, core: Tokenizer, control: dict[str, int]) -> None:
        self._core = core
        self._control = control
        self._ids = frozenset(control.values())
        self._pattern = re.compile(trie(control))
        added = core.get_added_tokens_decoder().values()
        self._words = frozenset(token.content for token in added if token.single_word)

    def encode(self, segments: Segments) -> list[int]:
        """The ids of the segments' text, as one text."""
        text = "".join(part for part, _ in segments)
        spans = trusted_spans(segments)
        if (count := self._allowed(text, spans)) is not None:
            ids = encode(self._core, text)
            if sum(number in self._ids for number in ids) == count:
                return ids
        return self._twin.encode(self._aliased(text, spans))

    def _allowed(self, text: str, spans: list[tuple[int, int]]) -> int | None:
        """How many control tokens `text` holds; None when one is not wholly inside a span."""
        count, at = 0, 0
        for found in self._find(text, 0, len(text)):
            while at < len(spans) and spans[at][1] < found.end():
                at += 1
            if at == len(spans) or found.start() < spans[at][0]:
                return None
            count += 1
        return count

    def _aliased(self, text: str, spans: list[tuple[int, int]]) -> str:
        """`text` with an alias for each control token in the spans."""
        pieces, position = [], 0
        for start, stop in spans:
            for found in self._find(text, start, stop):
                pieces += [text[position : found.start()], self._twin.alias(found[0])]
                position = found.end()
        return "".join([*pieces, text[position:]])

    def _find(self, text: str, start: int, stop: int) -> Iterator[re.Match[str]]:
        """The control tokens in a part of `text`, but for those that must stand alone and do not."""
        for found in self._pattern.finditer(text, start, stop):
            before, after = text[found.start() - 1 : found.start()], text[found.end() : found.end() + 1]
            if found[0] not in self._words or not (LETTER.match(before) or LETTER.match(after)):
                yield found

    @cached_property
    def _twin(self) -> Twin:
        return Twin(self._core, self._control)


class Twin:
    """The same tokenizer without control tokens, but with a secret alias for each."""

    def __init__(self, core: Tokenizer, control: dict[str, int]) -> None:
        self._nonce = secrets.token_hex(16)
        self._real: dict[int, int] = {}  # ids of the twin's own tokens -> ids of the core's
        self._ids = frozenset(control.values())
        self._tokenizer = Tokenizer(core.model)  # shared, not copied
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            if (part := getattr(core, name)) is not None:
                setattr(self._tokenizer, name, part)
        self._numbers = {word: number for number, word in enumerate(control)}
        for number, token in sorted(core.get_added_tokens_decoder().items()):
            self._add(token, number, self.alias(token.content) if token.content in control else token.content)
        self._tokenizer.add_special_tokens([AddedToken(self._cut, special=True, normalized=False)])
        self._empty = self._tokenizer.token_to_id(self._cut)
        self._own = frozenset({self._empty, *self._real})

    @property
    def _cut(self) -> str:
        """A token that stands for nothing: it only separates."""
        return f"\ue000{self._nonce}-\ue001"

    def alias(self, word: str) -> str:
        """What stands for the control token `word`."""
        return f"\ue000{self._nonce}{self._numbers[word]}\ue001"

    def encode(self, text: str) -> list[int]:
        """The ids of a text with aliases. A token that the model makes of plain text and that
        looks like a control token is taken apart by cuts."""
        for _ in range(ROUNDS):
            [found] = self._tokenizer.encode_batch([text], add_special_tokens=False)
            bad = [i for i, number in enumerate(found.ids) if number in self._ids and number not in self._own]
            if not bad:
                return [self._real.get(i, i) for i in found.ids if i != self._empty]
            for i in reversed(bad):
                start, stop = found.offsets[i]
                if stop - start < 2:
                    break
                text = text[: start + 1] + self._cut + text[start + 1 :]
        raise RequestError("the text holds a control token that cannot be told apart from plain text")

    def _add(self, token: AddedToken, number: int, content: str) -> None:
        copy = AddedToken(
            content,
            single_word=token.single_word and content == token.content,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and content == token.content,
            special=True,
        )
        self._tokenizer.add_special_tokens([copy])
        own = self._tokenizer.token_to_id(content)
        assert own is not None, "it was just added"
        self._real[own] = number


def encode(core: Tokenizer, text: str) -> list[int]:
    """The ids of a text, control tokens in it included. Other threads go on meanwhile."""
    return core.encode_batch_fast([text], add_special_tokens=False)[0].ids


def trusted_spans(segments: Segments) -> list[tuple[int, int]]:
    """[start, end) of the trusted parts of the joined text; neighbours are one."""
    spans: list[tuple[int, int]] = []
    position = 0
    for part, trusted in segments:
        if trusted and part:
            if spans and spans[-1][1] == position:
                spans[-1] = (spans[-1][0], position + len(part))
            else:
                spans.append((position, position + len(part)))
        position += len(part)
    return spans


def trie(words: Iterable[str]) -> str:
    """An expression that finds the longest of `words`, at a cost that does not grow with how many."""
    root: dict[str, dict] = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _branches(root) if root else "(?!)"


def _branches(node: dict[str, dict]) -> str:
    paths = [re.escape(letter) + _branches(child) for letter, child in sorted(node.items()) if letter]
    if "" not in node:
        return paths[0] if len(paths) == 1 else f"(?:{'|'.join(paths)})"
    return f"(?:{'|'.join(paths)})?" if paths else ""
