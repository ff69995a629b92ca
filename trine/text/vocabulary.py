"""A tokenizer from the metadata of a GGUF file.

Two kinds: `gpt2`, byte-level pieces with a list of merges, and `llama`, SentencePiece's pieces
with scores, whose merges follow from the scores. Keys and type numbers are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows nothing of the file itself.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import CheckpointError, Unsupported
from .parts import Parts, template_name
from .pretokenizer import Cut, cut

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
KEY = "tokenizer.ggml."
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space

# Files often forget to say that these end a turn, or even that they are control tokens.
ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
)


def from_metadata(metadata: dict[str, Any]) -> Parts:
    """The parts of the tokenizer that a GGUF file's metadata describes."""
    tokens = _list(metadata, "tokens", str)
    kinds = _kinds(metadata, tokens)
    match model := metadata.get(KEY + "model"):
        case "gpt2":
            if KEY + "pre" not in metadata:
                log.warning("the file does not say how its tokenizer cuts text (%spre); a guess is used", KEY)
            way = cut(str(metadata.get(KEY + "pre", "default")))
            core, bos_first = _byte_level(tokens, _list(metadata, "merges", str), way), way.bos
        case "llama":
            prefix = bool(metadata.get(KEY + "add_space_prefix", True))
            core, bos_first = _pieces(tokens, kinds, _scores(metadata, tokens), prefix), True
        case _:
            raise Unsupported(f"the file's tokenizer is of kind {model!r}; known are gpt2 and llama")
    _add_special(core, tokens, kinds)
    bos, eos = _id(metadata, "bos", tokens), _id(metadata, "eos", tokens)
    ends = {_id(metadata, name, tokens) for name in ("eos", "eot", "eom")}
    ends |= {i for i, token in enumerate(tokens) if token in ENDS}
    add_bos = bool(metadata.get(KEY + "add_bos_token", bos_first))
    add_eos = bool(metadata.get(KEY + "add_eos_token", False))
    return Parts(
        core=core,
        vocab=len(tokens),
        longest=max(map(len, tokens)),
        bos=bos,
        eos=tuple(sorted(ends - {None})),  # type: ignore[type-var]
        prefix=(bos,) if add_bos and bos is not None else (),
        suffix=(eos,) if add_eos and eos is not None else (),
        words=_words(metadata, tokens),
        templates=_templates(metadata),
    )


def _byte_level(tokens: list[str], merges: list[str], way: Cut) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, gap, right = merge.partition(" ")
        if not gap:
            raise CheckpointError(f"{KEY}merges: {merge!r:.80} is not two pieces with a space between")
        pairs.append((left, right))
    core = _model(vocab=vocab, merges=pairs, ignore_merges=way.whole)
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in way.expressions]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    if way.compose:
        core.normalizer = normalizers.NFC()
    return core


def _pieces(tokens: list[str], kinds: list[int], scores: list[float], prefix: bool) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == UNKNOWN), None)
    core = _model(
        vocab=vocab,
        merges=_merges(tokens, kinds, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )
    spaces = normalizers.Replace(" ", SPACE)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return core


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others; the piece with the higher score is made first."""
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] == NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[i], left, right, token[:at], token[at:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _model(**given: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**given))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{KEY}merges do not fit the tokens: {error}") from None


def _add_special(core: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are seen in text before anything is cut, and so are the user's own."""
    core.add_special_tokens(
        [
            AddedToken(tokens[i], special=True, normalized=False)
            for i, kind in enumerate(kinds)
            if kind in (CONTROL, UNKNOWN) and tokens[i]
        ]
    )
    core.add_tokens(
        [
            AddedToken(tokens[i], special=False, normalized=False)
            for i, kind in enumerate(kinds)
            if kind == USER and tokens[i]
        ]
    )


def _list(metadata: dict[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(KEY + name)
    if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
        raise CheckpointError(f"{KEY}{name}: a list of {kind.__name__} is wanted")
    return values


def _kinds(metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    kinds = list(metadata.get(KEY + "token_type") or [NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{KEY}token_type has {len(kinds)} entries, there are {len(tokens)} tokens")
    for i, token in enumerate(tokens):
        if token in ENDS:
            kinds[i] = CONTROL
    return kinds


def _scores(metadata: dict[str, Any], tokens: list[str]) -> list[float]:
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{KEY}scores has {len(scores)} entries, there are {len(tokens)} tokens")
    return scores


def _id(metadata: dict[str, Any], name: str, tokens: list[str]) -> int | None:
    number = metadata.get(f"{KEY}{name}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise CheckpointError(f"{KEY}{name}_token_id is {number!r:.40}, there are {len(tokens)} tokens")
    return number


def _words(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {f"{word}_token": _id(metadata, name, tokens) for word, name in names.items()}
    return {word: tokens[number] for word, number in found.items() if number is not None}


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one, `tokenizer.chat_template.NAME` are others."""
    start = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for key, text in metadata.items():
        if key == start and isinstance(text, str):
            found["default"] = text
        elif key.startswith(start + ".") and isinstance(text, str):
            found[template_name(key.removeprefix(start + "."), key)] = text
    return found
