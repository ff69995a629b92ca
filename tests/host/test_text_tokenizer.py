"""Tokenizers: token for token what the models' own give, from a folder and from a GGUF file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.kit import gguf_file
from tests.kit import text as kit
from trine.errors import CheckpointError, RequestError, Unsupported
from trine.text.pretokenizer import CUTS
from trine.text.tokenizer import Tokenizer
from trine.text.vocabulary import from_metadata

TEXTS = kit.texts(1000)
INT, TEXT = gguf_file.U32, gguf_file.STRING


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(from_metadata(metadata))


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of metadata only."""
    rows: gguf_file.Metadata = []
    for key, value in metadata.items():
        match value:
            case list() if isinstance(value[0], str):
                rows.append((key, gguf_file.ARRAY, (TEXT, value)))
            case list() if isinstance(value[0], float):
                rows.append((key, gguf_file.ARRAY, (gguf_file.F32, value)))
            case list():
                rows.append((key, gguf_file.ARRAY, (gguf_file.I32, value)))
            case bool():
                rows.append((key, gguf_file.BOOL, value))
            case int():
                rows.append((key, INT, value))
            case _:
                rows.append((key, TEXT, value))
    path.write_bytes(bytes(gguf_file.File(rows, [])))
    return path


def pieces(found: list[tuple[str, tuple[int, int]]]) -> list[str]:
    return [piece for piece, _ in found]


@pytest.mark.parametrize("style", kit.STYLES)
def test_a_folder_and_a_gguf_file_equal_the_models_own_tokenizer(style: str, tmp_path: Path) -> None:
    folder = kit.write_folder(tmp_path / style, style)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours, gguf = Tokenizer.open(folder), from_gguf(kit.byte_metadata(style))
    cut, way = (
        reference.backend_tokenizer.pre_tokenizer,
        from_metadata(kit.byte_metadata(style)).core.pre_tokenizer,
    )
    special = 0
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        special += bool(set(ids) & {0, 1, 2})
        assert pieces(way.pre_tokenize_str(text)) == pieces(cut.pre_tokenize_str(text))
        assert ours.encode(text, special=True) == ids, text
        assert gguf.encode(text, special=True) == ids, text
        if style != "qwen2":  # that one brings text to a normal form
            assert ours.decode(ids, skip_special=False) == text
            assert gguf.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert special > 10  # the texts do spell control tokens


@pytest.mark.parametrize("name", CUTS)
def test_every_way_to_cut_loses_nothing(name: str) -> None:
    tokenizer = from_gguf(kit.byte_metadata(name))
    for text in TEXTS[:100]:
        if not CUTS[name].compose:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_ways_to_cut_differ() -> None:
    text = "12345 I'Ll  go\n\n don't ...\r\n HTTPServer Don't a漢字b camelCase a_b (f)"
    found: dict[tuple[str, ...], str] = {}
    for name, way in CUTS.items():
        way_pieces = from_metadata(kit.byte_metadata(name)).core.pre_tokenizer.pre_tokenize_str(text)
        found.setdefault(tuple(pieces(way_pieces)), way.expressions[-1])
    assert len(found) == len({way.expressions for way in CUTS.values()})


def test_a_piece_that_is_a_token_is_one_where_merges_do_not_count() -> None:
    for name, way in CUTS.items():
        ids = from_gguf(kit.byte_metadata(name)).encode("zzz")
        assert (
            (len(ids) == 1) == way.whole == (name in ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))
        )


class Pieces:
    """SentencePiece's algorithm, slow and plain: join the neighbours whose piece scores highest, the
    leftmost first; what is no piece is spelled in bytes."""

    def __init__(self) -> None:
        tokens, scores, kinds = kit.sentence_pieces()
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = {token: scores[i] for i, token in enumerate(tokens) if kinds[i] == 1}

    def encode(self, text: str) -> list[int]:
        parts = list(("▁" + text if text else "").replace(" ", "▁"))
        while True:
            joins = [
                (-self.scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in self.scores
            ]
            if not joins:
                break
            _, at = min(joins)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids: list[int] = []
        for part in parts:
            ids += (
                [self.ids[part]]
                if part in self.scores
                else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
            )
        return ids


def test_pieces_with_scores_equal_the_plain_algorithm() -> None:
    tokenizer, reference = from_gguf(kit.sentence_metadata()), Pieces()
    for text in TEXTS:
        if not any(word in text for word in ("<s>", "</s>", "<unk>")):
            ids = reference.encode(text)
            assert tokenizer.encode(text) == ids, text
            # the mark for the space reads as one, which is the format's own loss
            assert tokenizer.decode(ids) == text.replace("▁", " "), text


def test_pieces_without_the_first_space() -> None:
    tokenizer = from_gguf(kit.sentence_metadata(prefix=False))
    for text in TEXTS[:200]:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def test_a_gguf_file_is_opened_through_the_sandbox(tmp_path: Path) -> None:
    metadata = kit.byte_metadata("smollm") | {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    opened = Tokenizer.open(write_gguf(tmp_path / "m.gguf", metadata))
    assert opened.encode("hello 42", special=True) == from_gguf(metadata).encode("hello 42")
    assert opened.templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert opened.words == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert Tokenizer.open(tmp_path / "m.gguf", "mine").chat_template == "mine"


def test_what_ends_and_begins_a_text(tmp_path: Path) -> None:
    plain = from_gguf(kit.byte_metadata("smollm"))
    assert (plain.bos, plain.eos) == (1, (0, 2))
    assert plain.encode("a", bos=True) == plain.encode("a")
    llama = from_gguf(kit.byte_metadata("llama-bpe"))
    assert llama.encode("a", bos=True) == [1, *llama.encode("a")]
    asked = from_gguf(
        kit.byte_metadata("smollm")
        | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    )
    assert asked.encode("a", bos=True) == [1, *asked.encode("a"), 2]
    folder = kit.write_folder(tmp_path / "f", "smollm")
    assert Tokenizer.open(folder).eos == (2,)
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": 0, "auto_map": {"AutoTokenizer": "evil.py"}})
    )
    assert Tokenizer.open(folder).eos == (0, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Tokenizer.open(folder).eos == (1, 2)


def test_a_post_processor_says_what_frames_a_text(tmp_path: Path) -> None:
    folder = kit.write_folder(tmp_path / "f", "llama-bpe")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode("hi", bos=True) == [1, *tokenizer.encode("hi")]
    assert tokenizer.encode("", bos=True) == [1]


def test_nothing_is_cut_or_padded_because_a_file_says_so(tmp_path: Path) -> None:
    folder = kit.write_folder(tmp_path / "f", "gpt-2")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {
        "strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.open(folder)
    assert (
        tokenizer.decode(tokenizer.encode("a longer text than two tokens")) == "a longer text than two tokens"
    )


BAD = {
    "an unknown cut": ({"tokenizer.ggml.pre": "later"}, Unsupported, "'later'"),
    "an unknown kind": ({"tokenizer.ggml.model": "bert"}, Unsupported, "'bert'"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, CheckpointError, "tokens"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": [1]}, CheckpointError, "tokens"),
    "merges of nothing": ({"tokenizer.ggml.merges": ["ab"]}, CheckpointError, "merges"),
    "merges of no tokens": ({"tokenizer.ggml.merges": ["xyzzy plugh"]}, CheckpointError, "merges"),
    "too few kinds": ({"tokenizer.ggml.token_type": [1]}, CheckpointError, "token_type"),
    "an end outside": ({"tokenizer.ggml.eos_token_id": 10**6}, CheckpointError, "eos_token_id"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_metadata_is_refused_by_name(name: str) -> None:
    change, error, word = BAD[name]
    with pytest.raises(error, match=word):
        from_metadata(kit.byte_metadata("smollm") | change)


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_the_name_of_a_template_is_never_a_path(tmp_path: Path) -> None:
    for name in ("../../x", "a/b", "", "x" * 65):
        config = {"chat_template": [{"name": name, "template": "{{ messages }}"}]}
        folder = kit.write_folder(tmp_path / "f", "gpt-2", config=config)
        with pytest.raises(CheckpointError, match="not a name"):
            Tokenizer.open(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_nor_is_the_name_in_a_gguf_file() -> None:
    with pytest.raises(CheckpointError, match="not a name"):
        from_metadata(kit.byte_metadata("smollm") | {"tokenizer.chat_template.../../x": "{{ messages }}"})


def test_a_template_file_goes_before_the_settings(tmp_path: Path) -> None:
    folder = kit.write_folder(tmp_path / "f", "gpt-2", config={"chat_template": "old"})
    assert Tokenizer.open(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    assert Tokenizer.open(folder).chat_template == "new"


def test_a_text_that_surely_does_not_fit_is_refused_with_the_numbers() -> None:
    tokenizer = from_gguf(kit.byte_metadata("smollm"))
    longest = max(map(len, kit.byte_metadata("smollm")["tokenizer.ggml.tokens"]))
    with pytest.raises(RequestError, match=f"16777216 characters; 8 tokens hold at most {8 * longest}"):
        tokenizer.encode("a" * 2**24, limit=8)
    with pytest.raises(RequestError, match="too long"):
        tokenizer.encode_segments([("a" * 2**24, False)], limit=8)
    assert len(tokenizer.encode("a" * 8 * longest, limit=8)) > 8  # what may fit is counted by who knows more


def test_half_of_a_surrogate_pair_is_refused() -> None:
    tokenizer = from_gguf(kit.byte_metadata("smollm"))
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_token_bytes_join_to_the_text_and_unknown_ids_are_nothing() -> None:
    tokenizer = from_gguf(kit.byte_metadata("gpt-2"))
    for text in TEXTS[:100]:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([10**6, 1]) == ""


def test_added_tokens_that_are_not_special_are_text(tmp_path: Path) -> None:
    added = [
        AddedToken("<think>", special=False, normalized=False),
        AddedToken("é ", special=False, normalized=False),
    ]
    folder = kit.write_folder(tmp_path / "f", "smollm", added)
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode("<think>é x")
    assert ids[:2] == [tokenizer.vocab - 2, tokenizer.vocab - 1]
    assert tokenizer.decode(ids) == "<think>é x"


def test_pieces_from_a_folder(tmp_path: Path) -> None:
    parts = from_metadata(kit.sentence_metadata())
    parts.core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    tokenizer, reference = (
        Tokenizer.open(tmp_path),
        PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")),
    )
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab) == (1, (2,), parts.vocab)
    for text in TEXTS[:300]:
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, special=True) == ids
        wanted = reference.decode(ids, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special=False) == wanted
