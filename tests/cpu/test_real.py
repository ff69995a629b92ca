"""Real weights: SmolLM2-135M-Instruct, the embedded default model. Skipped, with the reason, if it cannot be had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from trine import LLM, AsyncLLM, Sampling
from trine.errors import TrineError

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colors are",
    "In 1969, humans first",
    "A good recipe for bread begins with",
    "The largest planet in the solar system",
    "To be or not to be,",
    "Machine learning is",
    "Ein Hund und eine Katze",
    "1, 2, 3, 5, 8, 13,",
    "The mitochondria is",
    "Dear Sir or Madam,",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "My favourite season is",
    "Photosynthesis is the process",
    "The train leaves at noon and",
    "import numpy as np\n",
]
CHATS = [
    [{"role": "user", "content": f"Say something about {topic}."}]
    for topic in ("rivers", "bread", "clocks", "maps", "glass", "bees", "tides", "iron")
]


@pytest.fixture(scope="module")
def path() -> Path:
    from trine.loader.fetch import locate

    try:
        return locate("smollm2")
    except TrineError as error:
        pytest.skip(f"the weights of smollm2 cannot be had here: {error}")


@pytest.fixture(scope="module")
def llm(path: Path):
    made = LLM(str(path), max_num_seqs=16, max_model_len=1024)
    yield made
    made.close()


def test_float32_greedy_text_is_that_of_transformers(path: Path) -> None:
    """20 prompts x 64 tokens: each of our tokens is transformers' likeliest, given the same text before
    it; or lies within 1e-3 of it in logits (a near-tie, after which both go on from our token)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trine.loader.checkpoint import open as open_checkpoint

    llm = LLM(str(path), dtype="float32", max_num_seqs=20, max_model_len=256)
    tokens = [llm.tokenize(p) for p in PROMPTS]
    answers = [
        c.tokens for c in llm.generate(tokens, Sampling(temperature=0, max_tokens=64, ignore_eos=True))
    ]
    llm.close()
    checkpoint = open_checkpoint(path)
    oracle = LlamaForCausalLM(LlamaConfig.from_dict(checkpoint.config | {"dtype": "float32"})).eval()
    weights = {name: checkpoint.get(name).float() for name in checkpoint.names()}
    missing, extra = oracle.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not extra
    oracle.tie_weights()
    ties = 0
    with torch.inference_mode():
        for prompt, answer in zip(tokens, answers, strict=True):
            assert len(answer) == 64
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            ours = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            behind = logits.max(1).values - ours
            assert behind.max() < 1e-3, f"{prompt}: a token lies {behind.max()} behind"
            ties += int((behind > 0).sum())
    assert ties <= 3


def test_the_capital_of_france(llm: LLM) -> None:
    answer = llm.chat(
        [{"role": "user", "content": "Name the capital of France."}],
        Sampling(temperature=0, max_tokens=24),
    )[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.usage and answer.usage.output == len(answer.tokens)


def test_the_same_text_whatever_the_neighbours(llm: LLM) -> None:
    """The default arithmetic, greedy and seeded: together = alone = again, out of the cache."""
    for sampling in (
        Sampling(temperature=0, max_tokens=12),
        Sampling(temperature=0.9, seed=5, max_tokens=12, top_p=0.95),
    ):
        together = [c.tokens for c in llm.chat(CHATS, sampling)]
        alone = [llm.chat(messages, sampling)[0].tokens for messages in CHATS]
        assert together == alone


def test_n_samples_share_the_prompt(llm: LLM) -> None:
    prompt = llm.tokenize("A list of words: " + "river stone cloud " * 60)
    answers = llm.generate(prompt, Sampling(seed=3, max_tokens=6), n=4)
    assert len({tuple(a.tokens) for a in answers}) > 1
    whole_pages = len(prompt) // 16 * 16  # the open page is each sample's own
    assert [a.usage.cached for a in answers if a.usage] == [0, *[whole_pages] * 3]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("1, 2, 3, 4,", Sampling(temperature=0, max_tokens=16))[0].text
    cut = llm.generate("1, 2, 3, 4,", Sampling(temperature=0, max_tokens=16), stop=[whole[4:7]])[0]
    assert cut.text == whole[: whole.index(whole[4:7])]
    assert cut.finish_reason == "stop"
    one = llm.generate("1, 2, 3, 4,", Sampling(temperature=0, max_tokens=16), stop=whole[4:7])[0]
    assert one.text == cut.text


def test_a_stream_joins_to_the_whole(llm: LLM) -> None:
    whole = llm.chat(CHATS[0], Sampling(temperature=0, max_tokens=16))[0].text
    assert "".join(llm.stream_chat(CHATS[0], Sampling(temperature=0, max_tokens=16))) == whole


def test_leaving_a_stream_early_frees_the_engine(llm: LLM) -> None:
    for _ in llm.stream("The", Sampling(max_tokens=500, seed=1, ignore_eos=True)):
        break
    stats = llm._engine.stats()
    assert (stats.running, stats.waiting, stats.held) == (0, 0, 0)


def test_a_prompt_that_does_not_fit_says_by_how_much(llm: LLM) -> None:
    answer = llm.generate([5] * 1100, Sampling(max_tokens=4))[0]
    assert answer.finish_reason == "error" and answer.error
    assert "1100" in answer.error.replace(",", "") and "1024" in answer.error.replace(",", "")


def test_many_callers_share_the_steps_of_async_llm(path: Path, llm: LLM) -> None:
    """And a bad one fails alone; one that goes away leaves nothing behind."""
    sampling = Sampling(temperature=0, max_tokens=8)
    expected = [c.text for c in llm.chat(CHATS[:4], sampling)]

    async def ask() -> list[str]:
        async with AsyncLLM(str(path), max_num_seqs=8, max_model_len=512) as shared:
            gone = shared.stream("The", Sampling(max_tokens=400, ignore_eos=True))
            await anext(gone)
            answers = asyncio.gather(*(shared.chat(m, sampling) for m in CHATS[:4]))
            with pytest.raises(TrineError):
                await shared.generate([5] * 600)
            await gone.aclose()
            return [a.text for a in await answers]

    assert asyncio.run(ask()) == expected
