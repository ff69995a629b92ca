"""The plan itself, and how its reasons are collected. It does not know how anything is decided."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Struct

from trine.core.types import Group


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
    dtype: str  # of weights: int8, float32, bfloat16, float16
    activations: str = "float32"  # of what lies between the products
    kv_dtype: str = "float32"  # of the store, as torch calls it
    product: str  # a file of kernels/gemm
    fused: str = "reference"  # a file of kernels/fused
    table: str = "reference"  # a file of kernels/table
    sampling: str = "reference"  # a file of kernels/sampling
    platform: str
    attention: str
    page_size: int  # tokens
    groups: list[Group]  # pools, by kind of KV
    layer_groups: list[int]  # of each layer, its group
    max_model_len: int  # tokens
    max_num_seqs: int  # slots are one more: slot 0 is never given out
    budget: int  # tokens in a step
    depth: int
    graphs: list[
        int
    ] = []  # rows of one token for which steps are captured, ascending; none: all steps run eagerly
    ridge: float = 0.0  # tokens of a step from which its products compute longer than they read; 0: not known
    reach: float = 0.0  # work of attention for a position seen, in parts of a token's work in the products
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


class Reasons:
    """Collects choices in the order in which they are made."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    def note(self, name: str, value: Any, why: str) -> Any:
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        self.choices.append(Choice(name, shown, why))
        return value
