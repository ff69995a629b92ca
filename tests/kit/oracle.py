"""The plain answer: what a request gives when it is alone in the world, one token at a time.

It knows the fake model and the toy grammar, and nothing of engines, pages or batches.
"""

from __future__ import annotations

from trine.core.types import Sampling

from .fake import Model, digest


def allowed(rule: int, out: list[int]) -> list[int] | None:
    """A toy grammar: the ids that may follow the output so far; None: all. Rule 0: no grammar.

    Rule 1 forces three tokens after a free one that is a multiple of 5. Rule 2 leaves a choice
    of three after a multiple of 3. Rule 3 does both."""
    run: list[int] = []  # what must still follow
    for token in out:
        if run:
            run = run[1:]
        elif rule & 1 and token % 5 == 0:
            run = [(token + 1) % 32 | 1, 11, 13]
    if run:
        return run[:1]
    if rule & 2 and out and out[-1] % 3 == 0:
        return [1, 2, 4]
    return None


def forced(rule: int, out: list[int]) -> list[int]:
    """The tokens that must come next, whatever the model thinks."""
    run: list[int] = []
    while (ids := allowed(rule, out + run)) is not None and len(ids) == 1:
        run += ids
    return run


def oracle(
    model: Model, prompt: list[int], sampling: Sampling, max_len: int, tag: int = 0, rule: int = 0
) -> tuple[list[int], str]:
    """All output tokens of a request, and why it ends. `sampling.stop_ids` holds the eos ids too."""
    chain: list[int] = []
    for token in prompt:
        chain.append(digest(chain[-1] if chain else tag, token))
    out: list[int] = []
    while True:
        length = len(chain)
        ids = allowed(rule, out) if rule else None
        token = model.choose(model.see(chain, 0, length), sampling, length, len(out), ids)
        out.append(token)
        chain.append(digest(chain[-1], token))
        if token in sampling.stop_ids:
            return out, "stop"
        if len(out) >= sampling.max_tokens or len(chain) >= max_len:
            return out, "length"
