"""The plain answer: what a request gives when it is alone in the world, one token at a time.

It knows the fake model and the toy grammar, and nothing of engines, pages or batches.
"""

from __future__ import annotations

from trine.core.types import Sampling

from .fake import Model, digest, spoilt
from .grammar import allowed


def oracle(
    model: Model, prompt: list[int], sampling: Sampling, max_len: int, tag: int = 0, rule: int = 0
) -> tuple[list[int], str]:
    """All output tokens of a request, and why it ends. `sampling.stop_ids` holds the eos ids too."""
    chain: list[int] = []
    for token in prompt:
        chain.append(digest(chain[-1] if chain else tag, token))
    out: list[int] = []
    while True:
        if spoilt(sampling, len(out)):
            return out, "error"
        ids = allowed(rule, out) if rule else None
        token = model.alone(chain, sampling, len(out), ids)
        out.append(token)
        chain.append(digest(chain[-1], token))
        if token in sampling.stop_ids:
            return out, "stop"
        if len(out) >= sampling.max_tokens or len(chain) >= max_len:
            return out, "length"
