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
from .config import Config, served_name
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
    work: int  # activations of a full step, and the logits of `sequences` rows
    sequences: int  # rows that fit
    available: int
    machine: int  # all there is


def resolve(config: Config, path: Path, platform: Any = None, *, real: bool = True) -> Plan:
    """The Plan of a Config for the model at `path` on this machine (or on `platform`).

    `real`: what does not fit this machine is refused; else it is only asked what would be.

    ConfigError names the field that makes no sense; Unsupported says who was asked."""
    from .loader.checkpoint import open as open_checkpoint

    reasons = Reasons()
    checkpoint = open_checkpoint(path)
    name = checkpoint.config["model_type"]
    model = registry.family(name).Config.from_dict(checkpoint.config)
    kinds = model.kv()
    served = served_name(config)
    what = f"{name}, {len(kinds)} blocks, {_parameters(checkpoint) / 1e6:,.0f}M parameters, from {checkpoint.kind}"
    reasons.note("model", served, what)
    platform = platform or _platform(config, reasons)
    invariant = _invariant(config, reasons)
    dtype, product = _arithmetic(config, platform, invariant, reasons)
    windows, layer_groups = _groups(kinds)
    attention = _attention(config, model, kinds, windows, dtype, invariant, platform, reasons)
    cores = platform.facts().cores
    threads = reasons.note(
        "threads", config.threads or cores, "--threads" if config.threads else "the cores there are"
    )
    sizes = _sizes(config, checkpoint, model, kinds, dtype, platform, reasons)
    length, sequences, pages = _fit(config, model, sizes, reasons)
    if real:
        _refuse_more_than_there_is(config, sizes, pages)
    budget, depth = _steps(config, sequences, reasons)
    return Plan(
        model=served,
        path=str(path),
        family=name,
        load_format=config.load_format,
        dtype=dtype,
        product=product,
        platform=platform.name,
        attention=attention,
        page_size=config.block_size,
        groups=[Group(pages, window) for window in windows],
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
        vocab=model.vocab_size,
        eos=_eos(checkpoint, model.vocab_size, reasons),
        choices=reasons.choices,
    )


def _steps(config: Config, sequences: int, reasons: Reasons) -> tuple[int, int]:
    """Tokens in a step, and steps in flight."""
    budget = config.max_num_batched_tokens or max(BUDGET, sequences)
    given = "tokens in a step; --max-num-batched-tokens"
    why = "tokens in a step: a running stream waits no longer than a chunk of these takes"
    reasons.note("budget", budget, given if config.max_num_batched_tokens else why)
    shared = "on a CPU host and device share the cores: there is nothing to overlap"
    depth = reasons.note("depth", config.depth or 1, "--depth" if config.depth else shared)
    reasons.note("policy", config.policy, "who runs next (--policy)")
    reasons.note("capacity", config.capacity, "what happens when KV runs out (--capacity)")
    return budget, depth


def _parameters(checkpoint: Any) -> int:
    return sum(_count(shape) for shape in checkpoint.names().values())


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _platform(config: Config, reasons: Reasons) -> Any:
    """The platform asked for, or the first that is there."""
    asked = config.platform != "auto"
    kinds = (
        [registry.get("platforms", config.platform)]
        if asked
        else sorted(registry.find("platforms").values(), key=lambda kind: kind.order)
    )
    refusals = [(kind.name, kind.cannot()) for kind in kinds]
    able = [kind for kind, (_, cannot) in zip(kinds, refusals, strict=True) if cannot is None]
    if not able:
        raise Unsupported(
            "no platform can run: " + "; ".join(f"{name} cannot: {cannot}" for name, cannot in refusals)
        )
    platform = able[0]()
    facts = platform.facts()
    if config.tensor_parallel_size != 1:
        raise Unsupported(
            f"tensor_parallel_size {config.tensor_parallel_size}: the platform {platform.name} is one device; give 1, or leave it out"
        )
    reasons.note(
        "platform",
        platform.name,
        f"{facts.chip}, {facts.cores} cores{''.join(', ' + feature for feature in facts.features)}",
    )
    return platform


def _arithmetic(config: Config, platform: Any, invariant: bool, reasons: Reasons) -> tuple[str, str]:
    """dtype, and the product that computes it."""
    from .kernels.gemm.base import Want
    from .kernels.select import select

    default = (
        "the default on a CPU: int8 weights by output, activations by row in two 7-bit digits, exact sums"
    )
    dtype = (
        reasons.note("dtype", "int8", default)
        if config.dtype == "auto"
        else reasons.note("dtype", config.dtype, "--dtype")
    )
    facts = platform.facts()
    chosen = select(
        "kernels.gemm", Want(weights=dtype, invariant=invariant, device=facts.kind, features=facts.features)
    )
    return dtype, reasons.note("product", chosen.name, chosen.why)


def _attention(
    config: Config,
    model: Any,
    kinds: list[Any],
    windows: list[int],
    dtype: str,
    invariant: bool,
    platform: Any,
    reasons: Reasons,
) -> str:
    """One backend that serves every group of layers."""
    from .kernels.attention.base import Want
    from .kernels.select import select

    kv = "bfloat16" if dtype == "bfloat16" else "float32"
    for window in windows:
        kind = next(kind for kind in kinds if kind.window == window)
        want = Want(
            heads=model.num_attention_heads,
            kv_heads=kind.kv_heads,
            head_dim=kind.head_dim,
            page_size=config.block_size,
            kv_dtype=kv,
            window=window,
            invariant=invariant,
            device=platform.facts().kind,
        )
        chosen = select("kernels.attention", want, config.attention)
    return reasons.note("attention", chosen.name, chosen.why)


def _invariant(config: Config, reasons: Reasons) -> bool:
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
    config: Config, checkpoint: Any, model: Any, kinds: list[Any], dtype: str, platform: Any, reasons: Reasons
) -> Sizes:
    each = {"int8": 1, "bfloat16": 2, "float32": 4}[dtype]
    shapes = checkpoint.names()
    embedding = sum(_count(shape) for name, shape in shapes.items() if "embed_tokens" in name)
    weights = _parameters(checkpoint) * each + (4 * embedding if dtype == "int8" else 0)
    position = sum(2 * kind.kv_heads * kind.head_dim * max(2, each if each != 1 else 4) for kind in kinds)
    budget = config.max_num_batched_tokens or BUDGET
    asked = config.max_num_seqs or SEQUENCES
    step = budget * (model.hidden_size * 12 + model.intermediate_size * 4) * 4
    row = model.vocab_size * 12
    embedded = ", the embedding in float32 too" if dtype == "int8" else ""
    reasons.note("weights", _human(weights), f"as {dtype}{embedded}")
    available = _available(config, platform, weights + step + asked * row, reasons)
    sequences = min(asked, max(1, (available - weights - step) // 2 // row))
    work = step + sequences * row
    reasons.note("work space", _human(work), f"a step of {budget:,} tokens, logits of {sequences:,} rows")
    return Sizes(weights, position, work, sequences, available, platform.memory()[1])


def _available(config: Config, platform: Any, fixed: int, reasons: Reasons) -> int:
    """Bytes for weights, work and KV together."""
    free, total = platform.memory()
    if config.memory is not None:
        asked = size(config.memory, "memory")
        reasons.note(
            "memory", _human(asked), f"--memory; this machine has {_human(total)}, {_human(free)} of it free"
        )
        return asked
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
            f"give more (--memory {-(-(sizes.weights + sizes.work + page * -(-512 // config.block_size)) // 2**20)}MiB) or a smaller model",
            "memory",
        )
    wanted = config.max_model_len or model.max_position_embeddings
    if config.max_model_len and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the {model.max_position_embeddings} positions the model was made for",
            "max_model_len",
        )
    sequences = sizes.sequences
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
    rows, asked = min(sequences, pages - 1), config.max_num_seqs or SEQUENCES
    kept = "--max-num-seqs" if config.max_num_seqs else "the default on a CPU"
    why = f"shrunk from {asked:,}: more do not fit" if rows < asked else kept
    reasons.note("sequences", rows, f"{why}; {fits // length:,} fit at full context")
    return length, rows, pages


def _refuse_more_than_there_is(config: Config, sizes: Sizes, pages: int) -> None:
    """Memory that was asked for by name and that the machine does not have."""
    need = sizes.weights + sizes.work + pages * config.block_size * sizes.position
    if need > sizes.machine:
        field = "num_pages" if config.num_pages else "memory"
        raise ConfigError(
            f"{field}: {_human(need)} would be used, and this machine has {_human(sizes.machine)}; give less",
            field,
        )


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
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
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
