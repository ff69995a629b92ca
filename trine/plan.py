"""Plan: what will be done, decided once. `resolve(config, path)` leaves no `auto` and no None,
and keeps the reason of each choice. The plan is printed, hashed, and sent to workers."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from .core.types import Group


class Choice(Struct, frozen=True, array_like=True):
    """One decided thing: what, and why."""

    name: str
    value: str
    why: str


class Plan(Struct, frozen=True, kw_only=True):
    """Everything a worker needs to start, and everything a person wants to know first."""

    model: str  # the name clients use
    path: str  # local folder or .gguf file
    family: str  # a file of trine/models
    load_format: str  # auto, dummy
    dtype: str  # int8, float32, bfloat16
    product: str  # a file of kernels/gemm: how int8 products are computed
    platform: str
    attention: str
    page_size: int  # tokens
    groups: list[Group]  # pools, by kind of KV
    layer_groups: list[int]  # of each layer, its group
    max_model_len: int  # tokens
    max_num_seqs: int  # slots are one more: slot 0 is never given out
    budget: int  # tokens in a step
    depth: int
    policy: str
    capacity: str
    batch_invariant: bool
    threads: int
    seed: int
    vocab: int
    eos: list[int]
    choices: list[Choice] = []

    def fingerprint(self) -> str:
        """Of everything but the reasons: equal plans make equal engines."""
        bare = msgspec.structs.replace(self, choices=[])
        return hashlib.sha256(msgspec.json.encode(bare)).hexdigest()[:16]
