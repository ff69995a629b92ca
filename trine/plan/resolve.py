"""From what was asked to what will be done. `resolve(config, path)` leaves no `auto` and no None.

Reads facts (the checkpoint's header, the machine); starts nothing and allocates nothing.
"""

from __future__ import annotations

import os
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trine import registry
from trine.chip import CHIPS, rates
from trine.config import Config, served_name
from trine.core.types import Group
from trine.errors import ConfigError

from . import memory
from .kernel import BYTES, choose
from .machine import platform as find_platform
from .record import Plan, Reasons

GPU_DEPTH = 2
PAGE, WIDE_PAGE = 16, 64  # tokens
GPU_THREADS = 8  # of the host: loading a checkpoint is all they do


def resolve(config: Config, path: Path, platform: Any = None, *, real: bool = True) -> Plan:
    """The Plan of a Config for the model at `path` on this machine (or on `platform`).

    `real`: what does not fit in what is free is refused; else it is only asked what would be, and what is refused
    is only what the machine, or the one that is pretended, never had.

    ConfigError names the field that makes no sense; Unsupported says who was asked."""
    from trine.loader.checkpoint import open as open_checkpoint

    reasons = Reasons()
    checkpoint = open_checkpoint(path, dummy=config.load_format == "dummy")
    name = checkpoint.config["model_type"]
    family = registry.family(name)
    model = family.Config.from_dict(checkpoint.config)
    shapes = _shapes(config, checkpoint, family, model)
    served = _note_model(config, checkpoint, model, shapes, reasons)
    platform = platform or find_platform(config, reasons, real=real)
    invariant = _invariant(config, platform, reasons)
    config = replace(config, block_size=_page_size(config, platform, reasons))
    kernels = choose(config, checkpoint, model, platform, invariant, reasons)
    threads = _threads(config, platform, reasons)
    sizes = memory.sizes(config, shapes, model, kernels, platform, reasons, real=real)
    named = checkpoint.config.get("max_position_embeddings") is not None
    length, sequences, pages = memory.fit(config, model, sizes, reasons, named=named)
    memory.refuse_more_than_there_is(config, sizes, pages)
    windows, layer_groups = _groups(model.kv())
    return Plan(
        model=served,
        path=str(path),
        family=name,
        load_format=config.load_format,
        dtype=kernels.dtype,
        activations=kernels.activations,
        kv_dtype=kernels.kv_dtype,
        product=kernels.product,
        fused=kernels.fused,
        table=kernels.table,
        sampling=kernels.sampling,
        platform=platform.name,
        attention=kernels.attention,
        page_size=memory.page_size(config),
        groups=[Group(pages, window) for window in windows],
        layer_groups=layer_groups,
        max_model_len=length,
        max_num_seqs=sequences,
        budget=_budget(config, max(sizes.budget, sequences), reasons),
        depth=_depth(config, platform, reasons),
        graphs=_graphs(config, platform, sequences, reasons),
        ridge=_ridge(platform, kernels.dtype, reasons),
        reach=_reach(model, shapes),
        policy=reasons.note("policy", config.policy, "who runs next (--policy)"),
        capacity=reasons.note("capacity", config.capacity, "what happens when KV runs out (--capacity)"),
        batch_invariant=invariant,
        threads=threads,
        seed=config.dummy_seed,
        vocab=model.vocab_size,
        eos=_eos(checkpoint, model.vocab_size, reasons),
        choices=reasons.choices,
    )


def _page_size(config: Config, platform: Any, reasons: Reasons) -> int:
    """Matches inside a page are copied, so a large one costs only what is empty at the end of a sequence."""
    if config.block_size is not None:
        return reasons.note("page", config.block_size, "tokens; --block-size")
    facts = platform.facts()
    if facts.kind == "cuda" and facts.capability >= (9, 0):
        return reasons.note("page", WIDE_PAGE, "tokens: a tile of attention is one page, copied by hardware")
    return reasons.note("page", PAGE, "tokens: the default")


def _shapes(config: Config, checkpoint: Any, family: Any, model: Any) -> dict[str, tuple[int, ...]]:
    """Of every weight: as the checkpoint has it, or as random ones will be."""
    if config.load_format != "dummy":
        return checkpoint.names()
    from trine.loader.weights import shapes

    return shapes(family.Model, model)


def _note_model(
    config: Config, checkpoint: Any, model: Any, shapes: dict[str, tuple[int, ...]], reasons: Reasons
) -> str:
    millions = sum(map(prod, shapes.values())) / 1e6
    whence = "random weights" if config.load_format == "dummy" else f"from {checkpoint.kind}"
    what = f"{model.model_type}, {model.num_hidden_layers} blocks, {millions:,.0f}M parameters, {whence}"
    return reasons.note("model", served_name(config), what)


def _invariant(config: Config, platform: Any, reasons: Reasons) -> bool:
    name = "batch invariant"
    if config.batch_invariant is not None:
        return reasons.note(name, config.batch_invariant, "--batch-invariant, --no-batch-invariant")
    if platform.asynchronous:
        return reasons.note(name, False, "the default on a GPU: equal but for near-ties, and faster")
    return reasons.note(name, True, "the default on a CPU: the same text whatever the neighbours")


def _threads(config: Config, platform: Any, reasons: Reasons) -> int:
    if config.threads:
        return reasons.note("threads", config.threads, "--threads")
    if platform.asynchronous:
        cores = GPU_THREADS if config.platform in CHIPS else os.cpu_count() or 1  # of a host that is not here
        return reasons.note("threads", min(GPU_THREADS, cores), f"of the host, at most {GPU_THREADS}")
    return reasons.note("threads", platform.facts().cores, "the cores there are")


def _budget(config: Config, budget: int, reasons: Reasons) -> int:
    if config.max_num_batched_tokens:
        why = "tokens in a step; --max-num-batched-tokens"
        return reasons.note("budget", config.max_num_batched_tokens, why)
    return reasons.note(
        "budget", budget, "tokens in a step: a running stream waits no longer than a chunk of these takes"
    )


def _depth(config: Config, platform: Any, reasons: Reasons) -> int:
    if config.depth:
        return reasons.note("depth", config.depth, "--depth")
    if platform.asynchronous:
        return reasons.note("depth", GPU_DEPTH, "the next step is planned while the device computes this one")
    return reasons.note("depth", 1, "on a CPU host and device share the cores: there is nothing to overlap")


def _graphs(config: Config, platform: Any, rows: int, reasons: Reasons) -> list[int]:
    """Numbers of rows for which a step of single tokens is captured."""
    if platform.graph() is None:
        return []
    if config.enforce_eager:
        reasons.note("graphs", "none", "--enforce-eager")
        return []
    found = buckets(rows)
    shown = " ".join(map(str, found)) if len(found) < 8 else f"1 2 4 8 16 ... {found[-1]}"
    reasons.note("graphs", shown, f"{len(found)} sizes, for steps of one token a row; each is captured once")
    return found


def buckets(rows: int) -> list[int]:
    """Few for many rows, where some rows more cost little: 1 2 4 8, then by 8, from 256 by 16, from 512 by 32."""
    grid = chain((1, 2, 4), range(8, 256, 8), range(256, 512, 16), range(512, max(rows, 513), 32))
    return [*(size for size in grid if size < rows), rows]


def _ridge(platform: Any, dtype: str, reasons: Reasons) -> float:
    """A product of n tokens does 2 n operations for each weight, which is read once."""
    if not platform.asynchronous:
        return 0.0
    facts = platform.facts()
    ridge = rates(facts.kind, facts.chip, facts.capability).ridge * BYTES[dtype] / 2
    reasons.note("ridge", f"{ridge:.0f} tokens", "from these on a step computes longer than it reads weights")
    return round(ridge, 1)


def _reach(model: Any, shapes: dict[str, tuple[int, ...]]) -> float:
    """Operations of all layers' attention for one position, by those of a token's products."""
    seen = sum(4 * model.num_attention_heads * kind.head_dim for kind in model.kv())
    apart = ("embed_tokens.weight", "lm_head.weight")  # looked up; computed only where a row samples
    linear = sum(prod(s) for name, s in shapes.items() if len(s) > 1 and not name.endswith(apart))
    return seen / max(1, 2 * linear)


def _groups(kinds: list[Any]) -> tuple[list[int], list[int]]:
    """Windows of the groups, and of each layer its group."""
    windows: list[int] = []
    for kind in kinds:
        if kind.window not in windows:
            windows.append(kind.window)
    return windows, [windows.index(kind.window) for kind in kinds]


def _eos(checkpoint: Any, vocab: int, reasons: Reasons) -> list[int]:
    """End-of-text ids: generation_config.json before config.json."""
    for source, where in ((checkpoint.generation, "generation config"), (checkpoint.config, "config")):
        found = source.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if ids:
            if any(type(i) is not int for i in ids):
                raise ConfigError(
                    f"the {where}: eos_token_id is {found!r}, must be a token id or a list of them", "model"
                )
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
