"""Texts of every kind of Unicode, and small tokenizers trained on them, for the tests of text.

Everything is seeded: the same texts and the same vocabularies on every machine.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SCRIPTS = [
    "the quick brown fox jumps over the lazy dog", "Don't you'll we've I'M SHE'D it's o'clock",
    "Съешь же ещё этих мягких французских булок", "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία", "ßẞ ǅ ŉ ﬁ ﬀ Å Å Ω Ω ½ ² ① Ⅷ",
    "敏捷的棕色狐狸跳过了懒狗，你好。", "いろはにほへと ちりぬるを カタカナ ﾊﾝｶｸ", "다람쥐 헌 쳇바퀴에 타고파", "कखगघङ ज़िन्दगी क्षत्रिय",
    "สวัสดีชาวโลก กำลังทดสอบ", "வணக்கம் உலகம்", "שָׁלוֹם עוֹלָם", "مرحبا بالعالم ١٢٣ ﷺ", "አማርኛ ፊደል", "မြန်မာ", "𐍈𐌰𐌹 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚",
]  # fmt: skip
PIECES = [
    "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇩🇪", "👍🏽", "❤️", "é", "é", "ñ̃̄", "Z̷̧͉a̸l̶g̷o̸", "\u200b", "\u200d", "\ufeff", "\u2028", "\u0085",
    "\u00a0", "\u3000", "\u202e", "\u200f", "\x00", "\x07", "\x1b[0m", "\x7f", "\ufffd", "\uffff", "\U0010ffff", "\ue000",
    "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\t\t  \n", "0", "42", "3.14159", "1,000,000", "1e-9", "٣٤", "२०२६", "⁴₂",
    "def f(x):\n    return x**2  # ok\n", "<div class=\"a\">&amp;</div>", "{\"a\": [1, null]}", "a_b-c/d\\e", "!!!???...", "«»“”‘’",
    "zzz",
    "<|im_start|>", "<|im_end|>", "<|im_start", "|>", "<|", "<s>", "</s>", "<unk>", "<0x0A>", "Ġ", "▁", "Ċ", "<think>", "</think>", "[INST]",
]  # fmt: skip
PLAIN = [piece for piece in PIECES if "<" not in piece and piece != "zzz"]
CROSSING = [
    "12345 67890",
    "I'Ll  go\n\n don't ...\r\n",
    " HTTPServer Don't",
    "x42 y7",
    ") {\n  a",
    "\t\tif",
    "...\n\n",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def texts(count: int, seed: int = 0) -> list[str]:
    """`count` texts without surrogates."""
    rng = random.Random(seed)
    return [_text(rng) for _ in range(count)]


def _text(rng: random.Random) -> str:
    out: list[str] = []
    for _ in range(rng.randint(1, 8)):
        match rng.randrange(5):
            case 0:
                words = rng.choice(SCRIPTS).split(" ")
                out.append(rng.choice(["", " "]) + " ".join(rng.sample(words, rng.randint(1, len(words)))))
            case 1:
                out.append(rng.choice(PIECES))
            case 2:
                out.append(rng.choice([" ", "\n", "\t", "\r", "a", "7", "é", "-"]) * rng.randint(1, 12))
            case 3:
                out.append("".join(_letter(rng) for _ in range(rng.randint(1, 6))))
            case _:
                out.append(rng.choice(SCRIPTS)[rng.randrange(20) :])
    return "".join(out)


def _letter(rng: random.Random) -> str:
    while (
        0xD800
        <= (point := rng.choice([rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x110000)]))
        < 0xE000
    ):
        pass
    return chr(point)


@cache
def byte_level(size: int = 1000) -> dict[str, Any]:
    """vocab and merges of a byte-level vocabulary, control tokens first, as JSON."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )  # merges cross all borders
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=CONTROL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )  # fmt: skip
    core.train_from_iterator([*SCRIPTS * 4, *PLAIN * 2, *CROSSING * 9], trainer)
    model = json.loads(core.to_str())["model"]
    model["vocab"]["zzz"] = len(model["vocab"])  # a token that no merges make
    return model


@cache
def sentence_pieces(size: int = 700) -> tuple[list[str], list[float], list[int]]:
    """tokens, scores and kinds of a vocabulary as SentencePiece makes them: merges in order of score."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    core.train_from_iterator([*SCRIPTS * 4, *PLAIN], trainer)
    model = json.loads(core.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    merged = list(dict.fromkeys(merged))
    letters = [token for token in model["vocab"] if len(token) == 1]
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters))
    scores = [0.0] * len(heads) + [-float(i) for i in range(len(merged) + len(letters))]
    return [*heads, *merged, *letters], scores, kinds


def sentence_metadata(prefix: bool = True) -> dict[str, Any]:
    """GGUF metadata of `sentence_pieces`."""
    tokens, scores, kinds = sentence_pieces()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def byte_metadata(pre: str) -> dict[str, Any]:
    """GGUF metadata of `byte_level`, cut as `pre` says."""
    model = byte_level()
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_folder(
    path: Path, style: str, added: list[AddedToken] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A model folder whose tokenizer.json is written the way the models of `style` have it."""
    core = Tokenizer.from_str(json.dumps(STYLES[style]()))
    core.add_tokens(added or [])
    path.mkdir(exist_ok=True)
    core.save(str(path / "tokenizer.json"))
    words = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(words | (config or {})))
    return path


def _json(pre: Any, normalizer: Any = None, **model: Any) -> dict[str, Any]:
    """tokenizer.json around `byte_level`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": token} | flags for i, token in enumerate(CONTROL)],
        "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": byte_level() | model,
    }  # fmt: skip


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _bytes(expression: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": expression}


# As the tokenizer.json of these families has it.
CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = {"type": "Digits", "individual_digits": True}
STYLES: dict[str, Any] = {
    "gpt-2": lambda: _json(_bytes(True)),
    "smollm": lambda: _json(_sequence(DIGITS, _bytes(True))),
    "llama-bpe": lambda: _json(
        _sequence(_split(CASES + r"\p{N}{1,3}" + REST), _bytes(False)), ignore_merges=True
    ),
    "qwen2": lambda: _json(
        _sequence(_split(CASES + r"\p{N}" + REST), _bytes(False)), {"type": "NFC"}
    ),
    "deepseek-coder": lambda: _json(
        _sequence(
            _split("[\r\n]"), _split("\\s?\\p{L}+"), _split("\\s?\\p{P}+"), _split("[一-龥ࠀ-一가-퟿]+"), DIGITS, _bytes(False)
        )
    ),
}  # fmt: skip


def unigram_core() -> Tokenizer:
    """A model that would make `</s>` of plain text, if it were let."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz</>"]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in ("<unk>", "<s>", "</s>")]
    )
    return core
