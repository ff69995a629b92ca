"""What fits: bytes of weights, of the work of a step, and of KV; what does not fit shrinks and says so.

It does not know which kernels run.
"""

from __future__ import annotations

from math import prod
from typing import Any

from msgspec import Struct

from trine.amount import human, size
from trine.chip import CHIPS
from trine.config import Config
from trine.errors import ConfigError

from .kernel import BYTES, Kernels
from .record import Reasons

KV_BYTES_ON_A_CPU = 4 * 2**30  # unless memory is given: a laptop has other work too
SEQUENCES, BUDGET = 64, 512  # on a CPU; tokens of a step are what a waiting stream waits for
GPU_SEQUENCES, GPU_BUDGET, LEAST_BUDGET = 256, 16384, 1024
GPU_SHARE = 0.9  # of what is free
# On a GPU, beside what is counted: code of libraries and their work space, graphs, partial results of attention
# (85 MiB for 256 rows of an 8B), what the allocator rounds up.
RESERVE = 2**30
LEAST_PAGES = 2  # page 0 and one more
UNNAMED = "config.json names no max_position_embeddings"
HERE = "this machine"
ELSEWHERE = f", or plan for a machine that has more (`trine plan --device {'|'.join(CHIPS)}`)"


class Sizes(Struct, frozen=True):
    """Bytes, for the arithmetic of what fits."""

    weights: int
    position: int  # one token's KV over all layers
    work: int  # activations of a full step, and the logits of `sequences` rows
    sequences: int  # rows that fit
    budget: int  # tokens in a step
    available: int
    machine: int  # all there is to be had, or all there is in a plan alone
    where: str  # whose memory that is
    default: str  # what the defaults are for


class Work(Struct, frozen=True):
    """Bytes of a step."""

    token: int  # for each token of the budget
    row: int  # for each row that samples
    slot: int  # for each sequence in the device table
    rest: int


def sizes(
    config: Config,
    shapes: dict[str, tuple[int, ...]],
    model: Any,
    kernels: Kernels,
    platform: Any,
    reasons: Reasons,
    *,
    real: bool = True,
) -> Sizes:
    """The bytes of a plan but for its pages."""
    gpu = platform.asynchronous
    pretended = config.platform in CHIPS
    where = f"the {platform.facts().chip}" if pretended else HERE
    weights = _weights(shapes, kernels.dtype, reasons)
    position = sum(2 * kind.kv_heads * kind.head_dim for kind in model.kv()) * BYTES[kernels.kv_dtype]
    work = _gpu_work(config, model, kernels) if gpu else _cpu_work(model)
    budget = config.max_num_batched_tokens or (GPU_BUDGET if gpu else BUDGET)
    asked = config.max_num_seqs or (GPU_SEQUENCES if gpu else SEQUENCES)
    each = work.row + work.slot
    fixed = weights + work.rest + budget * work.token + asked * each
    available = _available(config, platform, fixed, where, reasons)
    if gpu and config.max_num_batched_tokens is None:
        while budget > LEAST_BUDGET and budget * work.token > (available - weights - work.rest) // 4:
            budget //= 2
    step = budget * work.token + work.rest
    sequences = min(asked, max(1, (available - weights - step) // 2 // each))
    total = step + sequences * each
    beside = f"; {human(work.rest)} for libraries, graphs and tables" if gpu else ""
    what = f"a step of {budget:,} tokens, logits of {sequences:,} rows{beside}"
    reasons.note("work space", human(total), what)
    free, machine = platform.memory()
    machine = free if gpu and real else machine
    default = f"the default on a {'GPU' if gpu else 'CPU'}"
    return Sizes(weights, position, total, sequences, budget, available, machine, where, default)


def _weights(shapes: dict[str, tuple[int, ...]], dtype: str, reasons: Reasons) -> int:
    embedding = sum(prod(shape) for name, shape in shapes.items() if "embed_tokens" in name)
    weights = int(sum(map(prod, shapes.values())) * BYTES[dtype]) + (4 * embedding if dtype == "int8" else 0)
    embedded = ", the embedding in float32 too" if dtype == "int8" else ""
    reasons.note("weights", human(weights), f"as {dtype}{embedded}")
    return weights


def _cpu_work(model: Any) -> Work:
    token = (model.hidden_size * 12 + model.intermediate_size * 4) * 4
    return Work(token, row=model.vocab_size * 12, slot=0, rest=0)


def _gpu_work(config: Config, model: Any, kernels: Kernels) -> Work:
    """The widest moment of a layer is its MLP (both halves, their product, hidden states) or its attention
    (queries, keys and values, the queries turned, the result)."""
    kind = model.kv()[0]
    heads = model.num_attention_heads * kind.head_dim
    qkv = heads + 2 * kind.kv_heads * kind.head_dim
    each = BYTES[kernels.activations]
    token = max(
        (4 * model.hidden_size + 3 * model.intermediate_size) * each,
        (3 * model.hidden_size + qkv + 2 * heads) * each,
    )
    length = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    slot = (length + 1 + -(-length // page_size(config))) * 4  # its tokens and its pages
    turns = length * 2 * kind.head_dim * 4
    return Work(token, row=model.vocab_size * 12, slot=slot, rest=RESERVE + turns)


def _available(config: Config, platform: Any, fixed: int, where: str, reasons: Reasons) -> int:
    """Bytes for weights, work and KV together."""
    free, total = platform.memory()
    if config.memory is not None:
        asked = size(config.memory, "memory")
        if asked > total:
            raise ConfigError(
                f"memory: {human(asked)} is more than the {human(total)} that {where} has; give less"
                f"{ELSEWHERE if where == HERE else ', or another --device'}",
                "memory",
            )
        why = f"--memory; {where} has {human(total)}, {human(free)} of it free"
        reasons.note("memory", human(asked), why)
        return asked
    if config.gpu_memory_utilization is not None or platform.asynchronous:
        part = config.gpu_memory_utilization or GPU_SHARE
        given = "--gpu-memory-utilization" if config.gpu_memory_utilization else "the default on a GPU"
        share = int(free * part)
        reasons.note("memory", human(share), f"{part:.0%} of {human(free)} free ({given})")
        return share
    share = min(free // 2, fixed + KV_BYTES_ON_A_CPU)
    why = f"half of {human(free)} free of {human(total)}, at most {human(KV_BYTES_ON_A_CPU)} of it for KV"
    reasons.note("memory", human(share), why)
    return share


def fit(
    config: Config, model: Any, sizes: Sizes, reasons: Reasons, *, named: bool = True
) -> tuple[int, int, int]:
    """Context, sequences and pages (page 0 counted) that fit; what shrank says so.

    `named`: the checkpoint says how long its context is; else what is taken is the family's default."""
    page = sizes.position * page_size(config)
    room = sizes.available - sizes.weights - sizes.work
    pages = config.num_pages or max(0, room // page)
    if pages < LEAST_PAGES:
        raise ConfigError(
            f"memory: the weights ({human(sizes.weights)}) and the work space ({human(sizes.work)}) leave no room for KV in {human(sizes.available)}; "
            f"give more (--memory {-(-(sizes.weights + sizes.work + page * -(-512 // page_size(config))) // 2**20)}MiB) or a smaller model",
            "memory",
        )
    wanted = _length(config, model.max_position_embeddings, named)
    sequences = sizes.sequences
    most = -(-wanted // page_size(config)) * sequences + 1
    capped = config.num_pages is None and pages > most and "GPU" not in sizes.default
    pages = most if capped else pages  # a GPU has nothing better to do with its memory than to keep prefixes
    fits = (pages - 1) * page_size(config)
    length = min(wanted, fits)
    given = (
        "; --num-pages"
        if config.num_pages
        else "; all sequences at full context need no more"
        if capped
        else ""
    )
    what = f"{fits:,} tokens of {human(sizes.position)}, {human((pages - 1) * page)}, pages of {page_size(config)}"
    reasons.note("kv", f"{pages - 1:,} pages", what + given)
    made_for = "what the model was made for" if named else f"the default: {UNNAMED}"
    made_for = "--max-model-len" if config.max_model_len else made_for
    shrunk = f"shrunk from {wanted:,}: no more KV fits" if length < wanted else made_for
    reasons.note("context", length, shrunk)
    _note_rows(config, sizes, rows := min(sequences, pages - 1), fits // length, reasons)
    return length, rows, pages


def _length(config: Config, most: int, named: bool) -> int:
    """Positions that are wanted, of the `most` that there can be."""
    if config.max_model_len and config.max_model_len > most:
        whose = (
            "the model was made for"
            if named
            else f"that are taken where {UNNAMED}; write it there if it is more"
        )
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the {most} positions {whose}",
            "max_model_len",
        )
    return config.max_model_len or most


def _note_rows(config: Config, sizes: Sizes, rows: int, full: int, reasons: Reasons) -> None:
    asked = config.max_num_seqs or (GPU_SEQUENCES if "GPU" in sizes.default else SEQUENCES)
    kept = "--max-num-seqs" if config.max_num_seqs else sizes.default
    why = f"shrunk from {asked:,}: more do not fit" if rows < asked else kept
    reasons.note("sequences", rows, f"{why}; {full:,} fit at full context")


def refuse_more_than_there_is(config: Config, sizes: Sizes, pages: int) -> None:
    """Memory that was asked for by name and that the machine does not have."""
    need = sizes.weights + sizes.work + pages * page_size(config) * sizes.position
    if need > sizes.machine:
        field = "num_pages" if config.num_pages else "memory"
        raise ConfigError(
            f"{field}: {human(need)} would be used, and {sizes.where} has {human(sizes.machine)}; give less",
            field,
        )


def page_size(config: Config) -> int:
    """Tokens in a page, which is decided before anything is counted."""
    assert config.block_size is not None
    return config.block_size
