"""Config: what the user asked for. Flags, `--help`, the reference page and the YAML file come from it.

A field's help is in its annotation; `alias` lists the names that users of other engines type.
This is the only file that reads environment variables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct


def option(
    help: str,
    *alias: str,
    group: str = "model",
    ge: float | None = None,
    le: float | None = None,
    same: dict[str, str] | None = None,
    plugins: str = "",
) -> Meta:
    """The annotation of one field: its help, other names of its flag, its group in `--help`, its bounds.

    `same`: other words for its values. `plugins`: its values are the names of a folder of plugins, and
    "auto" where that is the default. The help then says {names}, {summaries} or {chips}, which are looked up."""
    extra = {"alias": alias, "group": group, "ge": ge, "le": le, "same": same or {}, "plugins": plugins}
    return Meta(description=help, extra=extra)


# What other engines call the types of numbers.
NUMBERS = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "fp8_e4m3": "fp8",
}


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked. Every `None` and `auto` is decided by `resolve` with a reason."""

    model: Annotated[
        str, option("a folder or .gguf file, a name of the catalog, or a hub id org/name", "--model-path")
    ] = "smollm2"
    served_model_name: Annotated[
        str | None, option("the name clients use; default: the model as given", "--served-name")
    ] = None
    revision: Annotated[str | None, option("branch, tag or commit of a hub id")] = None
    load_format: Annotated[
        Literal["auto", "dummy"], option("dummy: random weights of the right shapes, for speed only")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "blocks", "int8", "float32", "bfloat16", "float16"],
        option(
            "arithmetic of the weights; auto: on a CPU blocks of 4 or 8 bits (native kernels; int8 where they cannot), on a GPU what the checkpoint has",
            same=NUMBERS,
        ),
    ] = "auto"
    platform: Annotated[
        str,
        option(
            "the device to run on; auto: the first that is there; there are: {names}; for `plan` also a GPU that is not here: {chips}",
            "--device",
            plugins="platforms",
        ),
    ] = "auto"

    max_model_len: Annotated[
        int | None,
        option(
            "longest prompt plus output, tokens; shrinks to fit",
            "--context-length",
            "--max-seq-len",
            group="memory",
            ge=2,
            le=2**24,
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        option(
            "most sequences in one step; shrinks to fit",
            "--max-running-requests",
            group="memory",
            ge=1,
            le=65536,
        ),
    ] = None
    memory: Annotated[
        str | None,
        option(
            "bytes the engine may use, such as 8GiB; default: gpu-memory-utilization of what is free",
            group="memory",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        option(
            "share of the device's free memory to use; default: 0.9, on a CPU 0.5 and at most 4 GiB of KV",
            "--mem-fraction-static",
            group="memory",
            ge=0.05,
            le=1.0,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "fp8"],
        option(
            "numbers of the KV; auto: like the arithmetic; fp8: half the memory, less exact",
            group="memory",
            same=NUMBERS,
        ),
    ] = "auto"
    block_size: Annotated[
        int | None,
        option(
            "tokens in a KV page; default: 16, on a GPU that copies tiles by itself (sm_90 and later) 64",
            "--page-size",
            group="memory",
            ge=1,
            le=256,
        ),
    ] = None
    num_pages: Annotated[
        int | None,
        option(
            "KV pages, instead of what memory allows",
            "--num-gpu-blocks-override",
            group="memory",
            ge=2,
            le=2**31,
        ),
    ] = None

    max_num_batched_tokens: Annotated[
        int | None,
        option("token budget of a step", "--chunked-prefill-size", group="scheduling", ge=1, le=2**20),
    ] = None
    policy: Annotated[
        str,
        option(
            "who runs next: {summaries}",
            "--schedule-policy",
            "--scheduling-policy",
            group="scheduling",
            plugins="scheduler.policies",
        ),
    ] = "fcfs"
    capacity: Annotated[
        Literal["max-use", "no-evict"],
        option(
            "max-use: fill memory, preempt when it runs out; no-evict: admit only what surely fits",
            group="scheduling",
        ),
    ] = "max-use"
    depth: Annotated[
        int | None,
        option(
            "steps in flight: 1 waits, 2 overlaps host and device; default: 2 on a GPU",
            group="scheduling",
            ge=1,
            le=4,
        ),
    ] = None
    max_queue: Annotated[
        int,
        option("waiting requests before 429", "--max-queued-requests", group="scheduling", ge=0, le=10**6),
    ] = 1024
    attention: Annotated[
        str,
        option(
            "attention backend; auto: the first that can; there are: {names}",
            "--attention-backend",
            group="device",
            plugins="kernels.attention",
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        option("no graphs of steps on a GPU: slower, starts sooner", "--disable-cuda-graph", group="device"),
    ] = False
    batch_invariant: Annotated[
        bool | None,
        option("the same text whatever the neighbours; default: on on a CPU, off elsewhere", group="device"),
    ] = None
    threads: Annotated[
        int | None, option("compute threads; default: the cores there are", group="device", ge=1, le=1024)
    ] = None
    tensor_parallel_size: Annotated[
        int, option("devices that share each layer", "--tp", "--tp-size", group="device", ge=1, le=1024)
    ] = 1
    dummy_seed: Annotated[
        int, option("seed of the random weights of --load-format dummy", group="device", ge=0, le=2**53)
    ] = 0

    host: Annotated[str, option("address to listen on", group="server")] = "127.0.0.1"
    port: Annotated[int, option("port to listen on", group="server", ge=0, le=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...], option("keys that clients may use (repeat); also TRINE_API_KEY", group="server")
    ] = ()
    insecure: Annotated[bool, option("allow a public address without a key", group="server")] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        option("Host names to answer to, beside loopback and the listening address (repeat)", group="server"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], option("browser origins to answer to (repeat); none by default", group="server")
    ] = ()
    admin_socket: Annotated[
        str | None, option("path of the admin Unix socket; default: in the run folder", group="server")
    ] = None
    max_body_bytes: Annotated[int, option("largest request body", group="server", ge=1024, le=2**30)] = (
        8 * 1024 * 1024
    )
    drain_seconds: Annotated[
        float, option("how long SIGTERM waits for running requests", group="server", ge=0, le=3600)
    ] = 30.0
    request_timeout: Annotated[
        float, option("seconds after which a request ends with an error", group="server", ge=1, le=7 * 86400)
    ] = 3600.0
    chat_template: Annotated[
        str | None, option("file with a chat template to use instead of the model's own", group="server")
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        option("how much to say", "--uvicorn-log-level", group="server"),
    ] = "info"


def served_name(config: Config) -> str:
    """The name clients use: as asked, or the model as given; of a local path its last part."""
    if config.served_model_name:
        return config.served_model_name
    path = Path(config.model)
    return path.absolute().name.removesuffix(".gguf") if path.exists() else config.model


def cache_folder() -> Path:
    """Where models and results are kept: TRINE_CACHE, or the user's cache folder."""
    if folder := os.environ.get("TRINE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trine"


def environment_keys() -> tuple[str, ...]:
    """API keys of TRINE_API_KEY, separated by commas."""
    return tuple(key for key in os.environ.get("TRINE_API_KEY", "").split(",") if key)


def interpreted() -> bool:
    """Whether Triton was told to run its kernels on a CPU, as it reads TRITON_INTERPRET."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "yes", "true", "t", "on")


def child_environment() -> dict[str, str]:
    """What child processes are given: our environment without the API keys, which they have no use for."""
    return {name: value for name, value in os.environ.items() if name != "TRINE_API_KEY"}
