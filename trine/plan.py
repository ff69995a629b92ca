"""Plan: what will be done, decided once. `resolve(config, path)` leaves no `auto` and no None,
and keeps the reason of each choice. The plan is printed, hashed, and sent to workers.

Reads facts (the checkpoint's header, the machine); starts nothing and allocates nothing.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from . import registry
from .config import Config
from .core.types import Group
from .errors import ConfigError, Unsupported

KV_BYTES_ON_A_CPU = 4 * 2**30  # unless memory is given: a laptop has other work too
SEQUENCES, BUDGET = 64, 512  # on a CPU; tokens of a step are what a waiting stream waits for
LEAST_PAGES = 2  # page 0 and one more


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


class Reasons:
    """Collects choices in the order in which they are made."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    def note(self, name: str, value: Any, why: str) -> Any:
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        self.choices.append(Choice(name, shown, why))
        return value


class Sizes(Struct, frozen=True):
    """Bytes, for the arithmetic of what fits."""

    weights: int
    position: int  # one token's KV over all layers
    work: int  # activations of a full step, and the table
    available: int


def resolve(config: Config, path: Path, platform: Any = None) -> Plan:
    """The Plan of a Config for the model at `path` on this machine (or on `platform`).

    ConfigError names the field that makes no sense; Unsupported says who was asked."""
    from .kernels import select
    from .loader.checkpoint import open as open_checkpoint

    reasons = Reasons()
    checkpoint = open_checkpoint(path)
    family = registry.family(checkpoint.config["model_type"])
    model = family.Config.from_dict(checkpoint.config)
    kinds = model.kv()
    reasons.note(
        "model",
        config.served_model_name or config.model,
        f"{checkpoint.config['model_type']}, {len(kinds)} blocks, {_parameters(checkpoint) / 1e6:,.0f}M parameters, {checkpoint.kind}",
    )
    platform = platform or _platform(config, reasons)
    if config.tensor_parallel_size != 1:
        raise Unsupported(
            f"tensor_parallel_size {config.tensor_parallel_size}: platform {platform.name} has one device; give 1, or leave it out"
        )
    dtype, product = _arithmetic(config, platform, reasons)
    invariant = _invariant(config, platform, reasons)
    groups, layer_groups = _groups(kinds)
    attention = select.attention(
        config.attention, kinds[0], model, platform, invariant, config.block_size, reasons.note
    )
    threads = reasons.note(
        "threads",
        config.threads or platform.facts().cores,
        "--threads" if config.threads else "the cores there are",
    )
    sizes = _sizes(config, checkpoint, model, kinds, dtype, product, platform, reasons)
    length, sequences, pages = _fit(config, model, sizes, reasons)
    budget = config.max_num_batched_tokens or max(BUDGET, sequences)
    reasons.note(
        "budget",
        budget,
        "tokens in a step; --max-num-batched-tokens"
        if config.max_num_batched_tokens
        else "tokens in a step: a stream waits no longer than a chunk of this size takes",
    )
    depth = reasons.note(
        "depth",
        config.depth or 1,
        "--depth" if config.depth else "on a CPU host and device share the cores: nothing to overlap",
    )
    reasons.note("policy", config.policy, "as asked, or the default")
    reasons.note("capacity", config.capacity, "as asked, or the default")
    vocab = model.vocab_size
    eos = _eos(checkpoint, vocab, reasons)
    return Plan(
        model=config.served_model_name or config.model,
        path=str(path),
        family=checkpoint.config["model_type"],
        load_format=config.load_format,
        dtype=dtype,
        product=product,
        platform=platform.name,
        attention=attention,
        page_size=config.block_size,
        groups=[Group(pages, window) for window in groups],
        layer_groups=layer_groups,
        max_model_len=length,
        max_num_seqs=sequences,
        budget=budget,
        depth=depth,
        policy=config.policy,
        capacity=config.capacity,
        batch_invariant=invariant,
        threads=threads,
        seed=config.dummy_seed,
        vocab=vocab,
        eos=eos,
        choices=reasons.choices,
    )


def _parameters(checkpoint: Any) -> int:
    return sum(_count(shape) for shape in checkpoint.names().values())


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _platform(config: Config, reasons: Reasons) -> Any:
    """The platform asked for, or the first that is there."""
    made = {name: kind() for name, kind in registry.find("platforms").items()}
    if config.platform != "auto":
        platform = registry.get("platforms", config.platform)()
        why = "--platform"
    else:
        platform = min((p for p in made.values() if p.available()), key=lambda p: p.order)
        why = "the first that is there"
    reasons.note("platform", platform.name, f"{why}: {platform.describe()}")
    return platform


def _arithmetic(config: Config, platform: Any, reasons: Reasons) -> tuple[str, str]:
    """dtype and the product that computes it."""
    from .kernels import select

    dtype = config.dtype
    if dtype == "auto":
        dtype = "int8"
        reasons.note(
            "dtype",
            dtype,
            "the default on a CPU: int8 weights by output, int8 activations by row, exact sums",
        )
    else:
        reasons.note("dtype", dtype, "--dtype")
    return dtype, select.product(dtype, platform, reasons.note)


def _invariant(config: Config, platform: Any, reasons: Reasons) -> bool:
    if config.batch_invariant is not None:
        return reasons.note(
            "batch invariant", config.batch_invariant, "--batch-invariant, --no-batch-invariant"
        )
    return reasons.note(
        "batch invariant", True, "the default on a CPU: the same text whatever the neighbours"
    )


def _groups(kinds: list[Any]) -> tuple[list[int], list[int]]:
    """Windows of the groups, and of each layer its group."""
    windows: list[int] = []
    for kind in kinds:
        if kind.window not in windows:
            windows.append(kind.window)
    return windows, [windows.index(kind.window) for kind in kinds]


def _sizes(
    config: Config,
    checkpoint: Any,
    model: Any,
    kinds: list[Any],
    dtype: str,
    product: str,
    platform: Any,
    reasons: Reasons,
) -> Sizes:
    from .kernels import select

    weights = round(_parameters(checkpoint) * select.weight_bytes(dtype, product))
    kv = 2 if dtype == "bfloat16" else 4
    position = sum(2 * kind.kv_heads * kind.head_dim * kv for kind in kinds)
    budget = config.max_num_batched_tokens or BUDGET
    sequences = config.max_num_seqs or SEQUENCES
    work = (
        budget * (model.hidden_size * 12 + model.intermediate_size * 4) * 4
        + sequences * model.vocab_size * 12
    )
    available = _available(config, platform, weights + work, reasons)
    reasons.note("weights", _human(weights), f"as {dtype} for the product {product}")
    reasons.note("work space", _human(work), f"a step of {budget:,} tokens, logits of {sequences:,} rows")
    return Sizes(weights, position, work, available)


def _available(config: Config, platform: Any, fixed: int, reasons: Reasons) -> int:
    """Bytes for weights, work and KV together."""
    free, total = platform.memory()
    if config.memory is not None:
        return reasons.note("memory", size(config.memory, "memory"), "--memory, bytes") or 0
    if config.gpu_memory_utilization is not None:
        share = int(free * config.gpu_memory_utilization)
        reasons.note(
            "memory",
            _human(share),
            f"{config.gpu_memory_utilization:.0%} of {_human(free)} free (--gpu-memory-utilization)",
        )
        return share
    share = min(free // 2, fixed + KV_BYTES_ON_A_CPU)
    reasons.note(
        "memory",
        _human(share),
        f"half of {_human(free)} free of {_human(total)}, at most {_human(KV_BYTES_ON_A_CPU)} of it for KV",
    )
    return share


def _fit(config: Config, model: Any, sizes: Sizes, reasons: Reasons) -> tuple[int, int, int]:
    """Context, sequences and pages (page 0 counted) that fit; what shrank says so."""
    page = sizes.position * config.block_size
    room = sizes.available - sizes.weights - sizes.work
    pages = config.num_pages or max(0, room // page)
    if pages < LEAST_PAGES:
        raise ConfigError(
            f"memory: the weights ({_human(sizes.weights)}) and the work space ({_human(sizes.work)}) leave no room for KV in {_human(sizes.available)}; "
            f"give more (--memory {_human(sizes.weights + sizes.work + LEAST_PAGES * page)}) or a smaller model",
            "memory",
        )
    wanted = config.max_model_len or model.max_position_embeddings
    if config.max_model_len and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the {model.max_position_embeddings} positions the model was made for",
            "max_model_len",
        )
    sequences = config.max_num_seqs or SEQUENCES
    pages = min(pages, -(-wanted // config.block_size) * sequences + 1) if config.num_pages is None else pages
    fits = (pages - 1) * config.block_size
    length = min(wanted, fits)
    reasons.note(
        "kv",
        f"{pages - 1:,} pages",
        f"{fits:,} tokens of {_human(sizes.position)}, {_human((pages - 1) * page)}, pages of {config.block_size}"
        + ("; --num-pages" if config.num_pages else ""),
    )
    shrunk = (
        f"shrunk from {wanted:,}: no more KV fits"
        if length < wanted
        else ("--max-model-len" if config.max_model_len else "what the model was made for")
    )
    reasons.note("context", length, shrunk)
    rows = min(sequences, pages - 1)
    why = (
        f"shrunk from {sequences:,}: there are no more pages"
        if rows < sequences
        else ("--max-num-seqs" if config.max_num_seqs else "the default on a CPU")
    )
    reasons.note("sequences", rows, f"{why}; {fits // length:,} fit at full context")
    return length, rows, pages


def _eos(checkpoint: Any, vocab: int, reasons: Reasons) -> list[int]:
    """End-of-text ids: generation_config.json before config.json."""
    for source, where in ((checkpoint.generation, "generation config"), (checkpoint.config, "config")):
        found = source.get("eos_token_id")
        ids = [found] if isinstance(found, int) else list(found or [])
        if ids:
            if bad := [i for i in ids if not 0 <= i < vocab]:
                raise ConfigError(
                    f"the {where} ends text with ids {bad}, outside the vocabulary of {vocab}", "model"
                )
            reasons.note("ends with", ", ".join(map(str, ids)), f"token ids, from the {where}")
            return ids
    reasons.note(
        "ends with", "nothing", "the checkpoint names no end-of-text token: answers end at max_tokens"
    )
    return []


def size(text: str, field: str) -> int:
    """Bytes of "8GiB", "500MB", "2g" or a plain number; ConfigError names `field`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise ConfigError(f"{field}: a size such as 8GiB or 500MB is wanted, found {text!r}", field)
    number, unit, binary = found.groups()
    base = 1000 if unit and not binary and text.lower().rstrip().endswith("b") else 1024
    return int(float(number) * base ** " kmgt".index(unit or " "))


def _human(count: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
