"""Real weights on a GPU: SmolLM2's greedy text is the CPU's, up to near-ties. Skipped if the weights cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.test_real import CHATS, PROMPTS, path
from trine import LLM, Sampling

__all__ = ["path"]  # a fixture

GREEDY = Sampling(temperature=0.0, max_tokens=48, logprobs=8)
NEAR = 0.2  # nats between two tokens that bfloat16 may swap
TIMES = 0.02  # the same in float32


def texts(path: Path, **options: object) -> list[list[tuple[int, dict[int, float]]]]:
    """By prompt: each token, and the likeliest ones with their log probabilities."""
    llm = LLM(str(path), max_num_seqs=16, max_model_len=1024, **options)
    try:
        done = llm.generate(PROMPTS, GREEDY) + llm.chat(CHATS, GREEDY)
    finally:
        llm.close()
    assert all(one.error is None for one in done)
    return [[(seen.token, dict(seen.top)) for seen in one.logprobs or []] for one in done]


@pytest.mark.parametrize(("dtype", "near"), [("float32", TIMES), ("bfloat16", NEAR)])
def test_text_is_the_cpus_up_to_near_ties(path: Path, dtype: str, near: float) -> None:
    true, found = texts(path, platform="cpu", dtype="float32"), texts(path, platform="cuda", dtype=dtype)
    same = total = 0
    for ours, theirs in zip(found, true, strict=True):
        for (token, _), (wanted, top) in zip(ours, theirs, strict=False):
            total += 1
            if token != wanted:
                assert token in top and top[wanted] - top[token] < near, (token, wanted, top)
                break
            same += 1
    assert same > 0.5 * sum(len(one) for one in true), f"{same} of {total} tokens alike"
