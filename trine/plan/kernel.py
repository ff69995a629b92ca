"""Which numbers, and which kernels for them: every family of kernels is asked, and says why not.

It does not know what fits.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec import Struct

from trine.chip import CHIPS
from trine.config import Config
from trine.errors import Unsupported
from trine.kernels.attention.base import Want as Attend
from trine.kernels.attention.native import PAGE, Native
from trine.kernels.installed import missing
from trine.kernels.native import library
from trine.kernels.select import select

from .record import Reasons

ON_A_CPU = "the default on a CPU: int8 weights by output, activations by row in two 7-bit digits, exact sums"
IN_BLOCKS = (
    "4 or 8 bits in blocks of 32, as a GGUF file has them, else 8; activations in 8: native kernels ({})"
)
BYTES = {
    "blocks": 1.0625,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}


class Kernels(Struct, frozen=True):
    """What was chosen: numbers, and a file of each family."""

    dtype: str
    activations: str
    kv_dtype: str
    product: str
    fused: str
    table: str
    sampling: str
    attention: str


def choose(
    config: Config, checkpoint: Any, model: Any, platform: Any, invariant: bool, reasons: Reasons
) -> Kernels:
    """Numbers from the wish and the checkpoint, then a kernel of each family for them."""
    facts = platform.facts()
    dtype = _dtype(config, checkpoint, model, facts, reasons)
    activations = dtype if platform.asynchronous else "float32"
    kv = _kv_dtype(config, dtype, activations, facts, reasons)
    # What is known of the wish, for all families: each takes what it asks for.
    offer = {
        "weights": dtype,
        "dtype": activations,
        "kv_dtype": kv,
        "heads": model.num_attention_heads,
        "page_size": config.block_size,
        "vocab": model.vocab_size,
        "invariant": invariant,
        "device": facts.kind,
        "features": facts.features,
        "capability": facts.capability,
        "cores": facts.cores,
        "pretended": config.platform in CHIPS,
        "granted": _granted(config, facts, reasons),
    }
    kinds = dict.fromkeys((kind.kv_heads, kind.head_dim, kind.window) for kind in model.kv())
    layers = [offer | dict(zip(("kv_heads", "head_dim", "window"), kind, strict=True)) for kind in kinds]
    return Kernels(
        dtype,
        activations,
        kv,
        product=_select("product", "kernels.gemm", [offer], reasons, "auto"),
        fused=_select("fused", "kernels.fused", [offer], reasons, "auto"),
        table=_select("table", "kernels.table", [offer], reasons, "auto"),
        sampling=_select("sampling", "kernels.sampling", [offer], reasons, "auto"),
        attention=_select("attention", "kernels.attention", layers, reasons, config.attention),
    )


def _dtype(config: Config, checkpoint: Any, model: Any, facts: Any, reasons: Reasons) -> str:
    reason = (
        _not_native(config, model, facts) if facts.kind == "cpu" else f"they are for a CPU, not {facts.kind}"
    )
    if config.dtype == "blocks" and reason:
        raise Unsupported(f"--dtype blocks needs the native kernels, and they cannot: {reason}")
    if config.dtype != "auto":
        return reasons.note("dtype", config.dtype, "--dtype")
    if facts.kind == "cpu":
        if reason is None:
            return reasons.note("dtype", "blocks", IN_BLOCKS.format(library.name()))
        return reasons.note("dtype", "int8", f"{ON_A_CPU}; native kernels cannot: {reason}")
    half = "float16" if facts.kind == "cuda" and facts.capability < (8, 0) else "bfloat16"
    stored = str(checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype") or "")
    if checkpoint.kind == "gguf":
        return reasons.note("dtype", half, "blocks of a GGUF file are computed in 16 bits")
    if stored == half or (stored == "float16" and half == "bfloat16"):
        return reasons.note("dtype", stored, "as the checkpoint says")
    return reasons.note("dtype", half, f"the default on a GPU; the checkpoint says {stored or 'nothing'}")


def _not_native(config: Config, model: Any, facts: Any) -> str | None:
    """Why a step cannot be one native call; None if it can."""
    if reason := library.cannot():
        return reason
    if config.attention not in ("auto", "native"):
        return f"--attention {config.attention}"
    for name in ("hidden_size", "intermediate_size"):
        if (size := getattr(model, name)) % library.GROUP:
            return f"{name} {size} is no multiple of {library.GROUP}"
    stored = _kv_dtype(config, "blocks", "float32", facts, Reasons())
    for kind in model.kv():
        sizes = model.num_attention_heads, kind.kv_heads, kind.head_dim, config.block_size or PAGE
        want = Attend(*sizes, kv_dtype=stored, window=kind.window, weights="blocks")
        if reason := Native.cannot(want):
            return f"their attention {reason}"
    return None


def _kv_dtype(config: Config, dtype: str, activations: str, facts: Any, reasons: Reasons) -> str:
    """Of the store. Two kinds of 8 bits: the MI300 series computes with one that has no infinities or -0."""
    if config.kv_cache_dtype == "fp8":
        kind = "float8_e4m3fnuz" if (facts.kind, facts.capability) == ("rocm", (9, 4)) else "float8_e4m3fn"
        return reasons.note("kv dtype", kind, "--kv-cache-dtype fp8")
    if config.kv_cache_dtype != "auto":
        return reasons.note("kv dtype", config.kv_cache_dtype, "--kv-cache-dtype")
    kept = "bfloat16" if dtype in ("bfloat16", "blocks") else activations
    return reasons.note("kv dtype", kept, "like the arithmetic")


def _granted(config: Config, facts: Any, reasons: Reasons) -> str | None:
    """What is missing here and taken to be there, on a machine that is pretended: Trine installs it on each."""
    if config.platform not in CHIPS or (lack := missing("triton")) is None:
        return None
    reasons.note("triton", "taken to be there", f"the plan is for the {facts.chip}; here {lack}")
    return lack


def _select(name: str, kind: str, offers: list[dict[str, Any]], reasons: Reasons, forced: str) -> str:
    try:
        chosen = select(kind, [want(kind, offer) for offer in offers], forced, offers[0]["granted"])
    except Unsupported as error:
        if not offers[0]["pretended"]:
            raise
        return reasons.note(name, "none", str(error))  # what is missing here need not be missing there
    return reasons.note(name, chosen.name, chosen.why)


def want(kind: str, offer: dict[str, Any]) -> Any:
    """The Want of a family, of what is offered; one without a Want of its own is shown everything."""
    made = getattr(import_module(f"trine.{kind}.base"), "Want", None)
    if made is None:
        return SimpleNamespace(**offer)
    asked = {field.name for field in msgspec.structs.fields(made)}
    return made(**{name: value for name, value in offer.items() if name in asked})
