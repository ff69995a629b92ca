"""`trine bench serve`: open-loop load on a server, percentiles, and a result that can be compared.

Arrivals are a Poisson process at `rate` a second (infinite: all at once), drawn before the
run, and do not wait for answers; later turns of a conversation follow the answer before them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import random
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from trine.errors import ConfigError
from trine.version import __version__

from .client import Client, Timing
from .datasets import Turn, build

PERCENTILES = (50, 90, 99)


class Load(Struct, frozen=True, kw_only=True):
    """What to send, and how fast."""

    url: str
    model: str | None = None
    key: str | None = None
    dataset: str = "unique"
    path: Path | None = None
    requests: int = 100
    input_words: int = 128
    output: int = 64
    rate: float = math.inf  # conversations a second
    seed: int = 0
    ignore_eos: bool = True
    timeout: float = 600.0


async def run(load: Load, progress: Any = None) -> dict[str, Any]:
    """Send the load; returns the result, ready for JSON. `progress(done, all)` is called as answers end."""
    if load.requests < 1 or not load.rate > 0:
        raise ConfigError("num-prompts: at least 1 is wanted, and a request-rate above 0", "num_prompts")
    client = Client(load.url, load.model or "", load.key, ignore_eos=load.ignore_eos, timeout=load.timeout)
    try:
        first = await client.first_model()
        client.model = load.model or first
        server = await client.server()
        conversations = build(
            load.dataset, load.requests, load.input_words, load.output, load.seed, load.path
        )
        total, timings = sum(map(len, conversations)), []
        started = time.monotonic()

        def ended(timing: Timing) -> None:
            timings.append(timing)
            if progress:
                progress(len(timings), total)

        due = _arrivals(len(conversations), load)
        await asyncio.gather(
            *(
                _converse(client, turns, at, started, ended)
                for turns, at in zip(conversations, due, strict=True)
            )
        )
        return _result(load, client.model, server, timings, time.monotonic() - started)
    finally:
        await client.close()


def _arrivals(count: int, load: Load) -> list[float]:
    rng, now, due = random.Random(load.seed + 1), 0.0, []
    for _ in range(count):
        due.append(now)
        now += rng.expovariate(load.rate) if math.isfinite(load.rate) else 0.0
    return due


async def _converse(client: Client, turns: list[Turn], due: float, started: float, ended: Any) -> None:
    await asyncio.sleep(max(0.0, due - (time.monotonic() - started)))
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.text})
        timing = await client.chat(messages, turn.output, due, started)
        ended(timing)
        if timing.error:
            return
        messages.append({"role": "assistant", "content": timing.text})
        due = time.monotonic() - started


def _result(
    load: Load, model: str, server: dict[str, Any], timings: list[Timing], seconds: float
) -> dict[str, Any]:
    good = [t for t in timings if t.error is None]
    prompt, cached, output = (
        sum(getattr(t, f"{kind}_tokens") for t in good) for kind in ("prompt", "cached", "output")
    )
    after_first = [
        (t.end - t.first) / (t.output_tokens - 1) for t in good if t.first is not None and t.output_tokens > 1
    ]
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "trine": __version__,
        "server": server,
        "model": model,
        "load": {
            k: getattr(load, k) if k != "path" else str(load.path or "")
            for k in load.__struct_fields__
            if k not in ("key", "url")
        }
        | {"rate": load.rate if math.isfinite(load.rate) else "inf"},
        "completed": len(good),
        "failed": len(timings) - len(good),
        "errors": sorted({t.error for t in timings if t.error})[:5],
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(output / seconds, 2),
        "total_tokens_per_second": round((prompt + output) / seconds, 2),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "time_to_first_token_seconds": percentiles([t.first for t in good if t.first is not None]),
        "inter_token_latency_seconds": percentiles([gap for t in good for gap in t.gaps]),
        "time_per_output_token_seconds": percentiles(after_first),
        "end_to_end_seconds": percentiles([t.end for t in good]),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Mean and nearest-rank percentiles; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{p}": round(ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)], 4) for p in PERCENTILES}
    return {"mean": round(sum(ordered) / len(ordered), 4)} | ranks | {"max": round(ordered[-1], 4)}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (
                line.partition(":")[2].strip()
                for line in info.read_text().splitlines()
                if line.startswith("model name")
            ),
            name,
        )
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The commit of the source tree this runs from, if it runs from one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        f"{result['completed']} completed, {result['failed']} failed in {result['seconds']} s",
        f"{result['output_tokens_per_second']} output tokens/s, {result['total_tokens_per_second']} tokens/s in all, {result['requests_per_second']} requests/s",
        f"{result['prompt_tokens']} prompt tokens, of which {result['cached_tokens']} cached; {result['output_tokens']} output tokens",
    ]
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "end_to_end"):
        if values := result[f"{name}_seconds"]:
            lines.append(
                f"{name.replace('_', ' '):24}"
                + "  ".join(f"{key} {value:.3f}" for key, value in values.items())
                + "  seconds"
            )
    return "\n".join([*lines, *(f"error: {error}" for error in result["errors"])])


def writable(path: Path, option: str) -> None:
    """ConfigError if the result could not be written there: said before minutes of work, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not os.path.lexists(path)
        # Without O_NONBLOCK a named pipe that nobody reads would hold us up for ever.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
        if new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, option, error) from None


def save(result: dict[str, Any], path: Path, option: str) -> None:
    """Write the result as JSON."""
    try:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, option, error) from None


def _unwritable(path: Path, option: str, error: Exception) -> ConfigError:
    why = getattr(error, "strerror", None) or error
    return ConfigError(
        f"--{option} {path}: cannot be written: {why}; give a file in a folder that can be written", option
    )
