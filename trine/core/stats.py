"""What one step tells metrics, logs, the page and the bench. The single source of all of them."""

from __future__ import annotations

from msgspec import Struct


class StepStats(Struct, frozen=True, omit_defaults=True, tag=True):
    """Counters grow for the life of the engine; the rest is of the moment."""

    step: int = 0
    seconds: float = 0.0  # of compute, this step
    rows: int = 0
    tokens: int = 0  # computed in this step
    running: int = 0
    waiting: int = 0
    pages: int = 0  # in the pools, page 0 apart
    held: int = 0  # by living sequences, each once
    cached: int = 0  # in the tree and held by no one: can be evicted
    reserved_tokens: int = 0  # KV positions in held pages
    used_tokens: int = 0  # of those, positions with KV (waste = 1 - used / reserved)
    # counters
    prompt_tokens: int = 0  # of admitted requests
    hit_tokens: int = 0  # of those, found in the cache
    computed_tokens: int = 0  # prompt and output tokens whose KV was computed
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    idle_seconds: float = 0.0  # that the device waited between steps, while there was work
