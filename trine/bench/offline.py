"""`trine bench offline`: the engine in this process, without a server, on seeded workloads.

It steps the engine as `LLM` does, on token ids, so that no tokenizer is needed and random weights will do.
It does not know how an engine is made: whoever calls it gives `start`.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import structs

from trine.config import Config
from trine.core.types import Output, Request, Sampling
from trine.errors import ConfigError, TrineError, Unsupported
from trine.version import __version__

from .serve import commit, machine
from .workload import WORKS, Asked, Work, totals, warm_up

EDGE = 8  # steps at either end of a run that are not like the others
LEAST = 4 * EDGE  # steps of which the edges are left out
Event = tuple[float, int]  # when, and how many tokens were new


def parse(text: str) -> dict[str, Work]:
    """Workloads of "w1,w3"; ConfigError lists what there is."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if bad := [name for name in names if name not in WORKS]:
        raise ConfigError(
            f"no workload is called {bad[0]!r}; there are: {', '.join(WORKS)} (several: w1,w4)", "workload"
        )
    if not names:
        raise ConfigError(f"no workload was named; there are: {', '.join(WORKS)}", "workload")
    return {name: WORKS[name] for name in names}


def run(
    config: Config,
    path: Path,
    works: dict[str, Work],
    start: Callable[[Config, Path], Any],
    *,
    repeat: int = 1,
    tell: Callable[[str], None] = lambda _: None,
    warm: Callable[[], list[list[Asked]]] = warm_up,
) -> dict[str, Any]:
    """Start the engine, measure each workload, and close it. `tell` hears each result as a line."""
    if set(works) == {"w2"} and config.max_num_seqs is None:
        config = structs.replace(config, max_num_seqs=works["w2"].together)
    began = time.perf_counter()
    engine, ready = start(config, path)
    started = time.perf_counter() - began
    try:
        desk = Desk(engine, ready.vocab, ready.max_num_seqs)
        _fits(works, ready.max_model_len)
        tell(f"started in {started:.1f} s; warming up")
        prepare(desk, warm())
        gc.collect()
        gc.freeze()  # as the server does: what the start made stays
        results = []
        for name, work in works.items():
            for result in measure(desk, work, repeat):
                results.append({"workload": name} | result)
                tell(line(results[-1]))
    finally:
        gc.unfreeze()
        engine.executor.close()
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "trine": __version__,
        "commit": commit(),
        "machine": machine(),
        "model": ready.model,
        "plan": {name: value for name, value, _ in ready.plan},
        "started_seconds": {"all": round(started, 3)} | ready.seconds,
        "kernels": desk.kernels,
        "results": results,
    }


class Watched:
    """An executor, and how long the host was held up by it: the rest of a step is the host's own."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.waited = 0.0  # seconds for results
        self.steps = 0

    def result(self, step: int) -> Any:
        began = time.perf_counter()
        result = self.executor.result(step)
        self.waited += time.perf_counter() - began
        self.steps += 1
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)


class Desk:
    """Puts requests to an engine and keeps time."""

    def __init__(self, engine: Any, vocab: int, rows: int) -> None:
        self.engine, self.vocab, self.rows = engine, vocab, rows
        self.watched = engine.executor = Watched(engine.executor)
        self.ids = itertools.count()
        self.kernels: Any = None  # launched for a layer, if the worker tells

    def ask(self, name: str) -> Any:
        """Something rare of the worker; None if it knows no such thing."""
        try:
            return self.engine.executor.call(name)[0]
        except Unsupported:
            return None

    def run(self, asked: list[Asked], temperature: float, together: int = 0) -> tuple[float, list[Event]]:
        """When it began, and what came when. All are there from the start; `together`: so many at a time."""
        if together >= self.rows:
            together = 0  # the engine itself runs no more
        began = time.perf_counter()
        queue = iter(asked)
        live = self._add(itertools.islice(queue, together or None), temperature)
        events: list[Event] = []
        while self.engine.busy:
            new = done = 0
            for output in self.engine.step():
                new += len(output.tokens)
                done += _ended(output)
            if new:
                events.append((time.perf_counter(), new))
            if done and together:
                live += self._add(itertools.islice(queue, done), temperature) - done
        if (got := sum(new for _, new in events)) != (wanted := totals(asked)[1]):
            raise TrineError(f"{got} tokens came where {wanted} were asked for")
        return began, events

    def _add(self, asked: Any, temperature: float) -> int:
        count = 0
        for prompt, outs in asked:
            number = next(self.ids)
            sampling = Sampling(temperature=temperature, max_tokens=outs, ignore_eos=True, seed=number)
            tokens = prompt if self.vocab > 100_000 else [token % self.vocab for token in prompt]
            self.engine.add(Request(id=f"b{number}", tokens=tokens, sampling=sampling))
            count += 1
        return count


def _ended(output: Output) -> bool:
    if output.error:
        raise TrineError(f"a request ended with an error: {output.error}")
    return output.finished is not None


def prepare(desk: Desk, rounds: list[list[Asked]]) -> None:
    """Everything is compiled and captured before the clock starts."""
    desk.ask("warm")
    for i, asked in enumerate(rounds):
        desk.run(asked, 1.0 if i == 0 else 0.0)
    desk.kernels = desk.ask("kernels")


def _fits(works: dict[str, Work], context: int) -> None:
    """ConfigError for a workload whose longest request is longer than the context."""
    for name, work in works.items():
        need = max(len(prompt) + output for prompt, output in work.make(work.rows[0] if work.rows else 0))
        if need > context:
            raise ConfigError(
                f"{name} has requests of {need:,} tokens, and the context holds {context:,}; "
                "give a model with a longer one, or another workload",
                "workload",
            )


def measure(desk: Desk, work: Work, repeat: int = 1) -> list[dict[str, Any]]:
    """The results of a workload: one, or for steps one for each number of rows."""
    if work.warm:
        desk.engine.flush()
        desk.run(work.warm(), work.temperature)
    if work.measure == "steps":
        able = [rows for rows in work.rows if rows <= desk.rows]
        refused = [
            {"rows": rows, "skipped": f"the engine runs at most {desk.rows} rows"}
            for rows in work.rows
            if rows not in able
        ]
        return [_steps(desk, work, rows, repeat) for rows in able] + refused
    return [{"all": _all, "stream": _stream, "prompts": _prompts}[work.measure](desk, work, repeat)]


def _all(desk: Desk, work: Work, repeat: int) -> dict[str, Any]:
    asked = work.make(0)
    ins, outs = totals(asked)
    seconds, host = [], []
    for _ in range(repeat):
        desk.engine.flush()
        before = desk.watched.waited, desk.watched.steps
        began, events = desk.run(asked, work.temperature, work.together)
        seconds.append(events[-1][0] - began)
        steps = desk.watched.steps - before[1]
        host.append((seconds[-1] - (desk.watched.waited - before[0])) / steps * 1e3)
    took = statistics.median(seconds)
    return {
        "seconds": _round(took),
        "all_seconds": list(map(_round, seconds)),
        "tokens_in": ins,
        "tokens_out": outs,
        "out_tokens_per_second": round(outs / took, 1),
        "tokens_per_second": round((ins + outs) / took, 1),
        "steps": steps,
        "host_ms_per_step": _round(statistics.median(host)),
    } | _together(desk, work)


def _together(desk: Desk, work: Work) -> dict[str, Any]:
    if not work.together:
        return {}
    limit = desk.rows <= work.together
    return {"limit": f"max_num_seqs {desk.rows}" if limit else f"{work.together} at a time are asked"}


def _stream(desk: Desk, work: Work, repeat: int) -> dict[str, Any]:
    firsts, gaps = [], []
    for i in range(work.rounds * repeat):
        desk.engine.flush()
        began, events = desk.run(work.make(i % work.rounds), work.temperature)
        firsts.append((events[0][0] - began) * 1e3)
        gaps += [(b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(events)]
    return {
        "first_token_ms": _round(statistics.median(firsts)),
        "all_first_token_ms": list(map(_round, firsts)),
        "inter_token_ms_median": _round(statistics.median(gaps)),
        "inter_token_ms_mean": _round(statistics.mean(gaps)),
        "inter_token_ms_p99": _round(statistics.quantiles(gaps, n=100)[98]),
    }


def _prompts(desk: Desk, work: Work, repeat: int) -> dict[str, Any]:
    seconds = []
    for i in range(work.rounds * repeat):
        desk.engine.flush()
        asked = work.make(i % work.rounds)
        began, events = desk.run(asked, work.temperature)
        seconds.append(events[-1][0] - began)
    took = statistics.median(seconds)
    return {
        "seconds": _round(took),
        "all_seconds": list(map(_round, seconds)),
        "prefill_tokens_per_second": round(totals(asked)[0] / took, 1),
    }


def _steps(desk: Desk, work: Work, rows: int, repeat: int) -> dict[str, Any]:
    """Of the steps between two that gave every row a token, without the first and the last few."""
    each, host, firsts = [], [], []
    for _ in range(repeat):
        desk.engine.flush()
        desk.watched.waited = 0.0
        began, events = desk.run(work.make(rows), work.temperature)
        firsts.append((events[0][0] - began) * 1e3)
        found = [(b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(events) if a[1] == b[1] == rows]
        each += found[EDGE:-EDGE] if len(found) > LEAST else found
        host.append((events[-1][0] - began - desk.watched.waited) / len(events) * 1e3)
    if not each:
        return {"rows": rows, "skipped": f"no two steps in a row gave all {rows} rows a token"}
    return {
        "rows": rows,
        "steps": len(each),
        "step_ms_median": _round(statistics.median(each)),
        "step_ms_mean": _round(statistics.mean(each)),
        "first_token_ms": _round(statistics.median(firsts)),
        "host_ms_per_step": _round(statistics.median(host)),
        "out_tokens_per_second": round(rows / statistics.mean(each) * 1e3, 1),
    }


def _round(value: float) -> float:
    return round(value, 4)


UNITS = {
    "step_ms_median": "ms a step",
    "out_tokens_per_second": "output tokens/s",
    "prefill_tokens_per_second": "prompt tokens/s",
    "inter_token_ms_median": "ms between tokens",
    "inter_token_ms_p99": "ms at the 99th percentile",
    "first_token_ms": "ms to the first token",
    "host_ms_per_step": "ms of the host in each",
    "seconds": "s in all",
    "skipped": "",
    "limit": "",
}


def line(result: dict[str, Any]) -> str:
    """A result for a person."""
    name = result["workload"] + (f" {result['rows']} rows" if "rows" in result else "")
    said = [f"{_shown(result[key])} {unit}".strip() for key, unit in UNITS.items() if key in result]
    return f"{name:14}" + ", ".join(said)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
