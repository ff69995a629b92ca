"""A tokenizer from a model folder: tokenizer.json and the small files beside it.

Only names of this file are opened, and nothing in them is run: a tokenizer that is Python code
or a pickle is not read, and the name of a chat template is never the name of a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import CheckpointError, Unsupported
from ..loader.files import open_regular, read_json
from .parts import Parts, template_name

TOKENIZER_BYTES = 128 * 2**20
TEMPLATE_BYTES = 2**20


def from_folder(path: Path) -> Parts:
    """The parts of the tokenizer in the folder `path`."""
    core = _core(path / "tokenizer.json")
    config = _json(path, "tokenizer_config.json")
    words = _words(_json(path, "special_tokens_map.json")) | _words(config)
    vocab = core.get_vocab(True)
    prefix, suffix = _frame(core)
    return Parts(
        core=core,
        vocab=max(vocab.values()) + 1,
        longest=max(map(len, vocab)),
        bos=vocab.get(words.get("bos_token", "")),
        eos=_ends(path, vocab, words),
        prefix=prefix,
        suffix=suffix,
        words=words,
        templates=_templates(path, config),
    )


def _core(path: Path) -> Tokenizer:
    if not path.exists():
        raise Unsupported(
            f"{path.parent}: has no tokenizer.json; other kinds of tokenizer files are not read"
        )
    with open_regular(path) as file:
        raw = file.read(TOKENIZER_BYTES + 1)
    if len(raw) > TOKENIZER_BYTES:
        raise CheckpointError(f"{path}: is over {TOKENIZER_BYTES} bytes")
    try:
        core = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: {str(error)[:300]}") from None
    core.no_truncation()  # nothing is silently cut
    core.no_padding()
    return core


def _json(path: Path, name: str) -> dict[str, Any]:
    return read_json(path / name) if (path / name).exists() else {}


def _words(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that have a role, by the name that templates use."""
    found = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _frame(core: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a plain text."""
    bare, full = core.encode("a", add_special_tokens=False).ids, core.encode("a").ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _ends(path: Path, vocab: dict[str, int], words: dict[str, str]) -> tuple[int, ...]:
    """Every id that ends a text: the generation settings' own, or the model's; and the tokenizer's."""
    config = _json(path, "config.json")
    text = config.get("text_config")
    given = _json(path, "generation_config.json").get("eos_token_id")
    if given is None:
        given = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    ends = {number for number in (given if isinstance(given, list) else [given]) if isinstance(number, int)}
    if (own := vocab.get(words.get("eos_token", ""))) is not None:
        ends.add(own)
    return tuple(sorted(ends))


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """A file of its own goes before what the tokenizer's settings say."""
    if (file := path / "chat_template.jinja").exists():
        return {"default": read_template(file)}
    given = config.get("chat_template") or _json(path, "chat_template.json").get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    found: dict[str, str] = {}
    for entry in given if isinstance(given, list) else []:
        match entry:
            case {"name": name, "template": str(template)}:
                found[template_name(name, str(path))] = template
            case _:
                raise CheckpointError(f"{path}: an entry of chat_template has no name or no template")
    return found


def read_template(path: Path) -> str:
    """The chat template in a file that the operator or the model names."""
    try:
        with path.open("rb") as file:
            raw = file.read(TEMPLATE_BYTES + 1)
        if len(raw) > TEMPLATE_BYTES:
            raise CheckpointError(f"{path}: a chat template has at most {TEMPLATE_BYTES} bytes")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: the chat template cannot be read: {error}") from None
