"""What dashboards read: StepStats and the service's timings as Prometheus series.

Names mirror vLLM's where the meaning is the same, under `trine_`. Only what is measured is shown.
All state is in the `Metrics` object (a registry of its own), so two servers in one process do not
mix. It does not know of HTTP: `text()` is the body of the answer.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from trine.core.messages import Ready
from trine.core.stats import StepStats
from trine.core.types import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "trine_"
REASONS = ("stop", "length", "abort", "error")  # of requests; shown from the start, at 0
FIRST = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)  # fmt: skip
BETWEEN = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 10)  # fmt: skip
WHOLE = (.1, .25, .5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920, 3600)  # fmt: skip
LENGTHS = tuple(d * 10**e for e in range(7) for d in (1, 2, 5))[:19]  # 1 to a million tokens

# Series of StepStats: gauges are set, counters grow by what the field has grown.
GAUGES = {
    "num_requests_running": ("running", "sequences in the steps"),
    "num_requests_waiting": ("waiting", "sequences that wait for a place"),
    "kv_pages": ("pages", "KV pages there are"),
    "kv_pages_held": ("held", "KV pages of live sequences"),
    "kv_pages_cached": ("cached", "KV pages kept for reuse, given up when needed"),
    "step_seconds": ("seconds", "compute time of the last step"),
    "step_rows": ("rows", "sequences in the last step"),
    "step_tokens": ("tokens", "tokens computed in the last step"),
}
COUNTERS = {
    "prefix_cache_queries": ("prompt_tokens", "prompt tokens looked up in the cache"),
    "prefix_cache_hits": ("hit_tokens", "of those, found"),
    "computed_tokens": ("computed_tokens", "prompt and output tokens whose KV was computed"),
    "device_idle_seconds": ("idle_seconds", "the device waited for the next step while there was work"),
    "num_preemptions": ("preemptions", "sequences that gave up their pages for others"),
}
# Series of client.Counts.
FAULTS = {
    "engine_restarts": ("restarts", "engines that were replaced after a death"),
    "poisoned_requests": ("poisoned", "requests given up because the engine failed on them alone"),
    "dropped_frames": ("bad_frames", "frames that were not readable"),
    "repeated_frames": ("repeated_frames", "frames seen before"),
    "late_outputs": ("late_outputs", "outputs for requests that had ended"),
}


class Metrics:
    """One for a server: the engine's client tells it of the engine, the service of its requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._last: dict[str, float] = {}  # counters as their source told them last
        self._gauges = {name: self._gauge(name, help) for name, (_, help) in GAUGES.items()}
        self._counters = {name: self._counter(name, help) for name, (_, help) in (COUNTERS | FAULTS).items()}
        self._usage = self._gauge("kv_cache_usage_perc", "KV pages of live sequences, 1 is all")
        self._waste = self._gauge("kv_waste_ratio", "KV positions in held pages that hold nothing")
        self._start = self._gauge("startup_seconds", "of the last start, by phase", "phase")
        self._cache = self._gauge("cache_config_info", "of the KV cache; always 1", "page_size", "num_pages")
        self._prompt = self._counter("prompt_tokens", "prompt tokens of ended requests")
        self._cached = self._counter("prompt_tokens_cached", "of those, found in the cache")
        self._generated = self._counter("generation_tokens", "tokens sent to clients")
        self._success = self._counter("request_success", "requests ended", "finished_reason")
        self._refused = self._counter("admission_rejections", "requests not taken", "reason")
        self._first = self._times("time_to_first_token_seconds", "from arrival", FIRST)
        self._between = self._times("inter_token_latency_seconds", "between tokens of one sequence", BETWEEN)
        self._each = self._times(
            "request_time_per_output_token_seconds", "after the first, mean of a request", BETWEEN
        )
        self._whole = self._times("e2e_request_latency_seconds", "from arrival to the end", WHOLE)
        self._prompts = self._times("request_prompt_tokens", "prompt tokens of a request", LENGTHS)
        self._outputs = self._times("request_generation_tokens", "output tokens of a request", LENGTHS)
        for reason in REASONS:
            self._success.labels(reason)

    # ---- the engine's -------------------------------------------------------------------
    def step(self, stats: StepStats) -> None:
        """The latest numbers; telling the same ones twice changes nothing."""
        for name, (field, _) in GAUGES.items():
            self._gauges[name].set(getattr(stats, field))
        self._grow(COUNTERS, stats)
        self._usage.set(stats.held / stats.pages if stats.pages else 0.0)
        used, reserved = stats.used_tokens, stats.reserved_tokens
        self._waste.set(1 - used / reserved if reserved else 0.0)

    def engine(self, counts: Any) -> None:
        """A client.Counts."""
        self._grow(FAULTS, counts)

    def started(self, ready: Ready) -> None:
        """An engine is ready, the first or another."""
        self._cache.clear()
        self._cache.labels(ready.page_size, ready.pages).set(1)
        for phase, seconds in ready.seconds.items():
            self._start.labels(phase).set(seconds)

    # ---- the service's: of one sequence, in seconds ---------------------------------------
    def first_token(self, seconds: float) -> None:
        """From the request's arrival."""
        self._first.observe(seconds)

    def tokens(self, count: int) -> None:
        """Sent to a client, the first ones too."""
        self._generated.inc(count)

    def token(self, seconds: float, count: int = 1) -> None:
        """Since the sequence's last token; `count` came together."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def finished(self, reason: str, seconds: float, usage: Usage | None = None, first: float = 0.0) -> None:
        """`seconds` from the arrival to the end, `first` to the first token."""
        self._success.labels(reason if reason in REASONS else "error").inc()
        self._whole.observe(seconds)
        if usage is None:
            return
        self._prompt.inc(usage.prompt)
        self._cached.inc(usage.cached)
        self._prompts.observe(usage.prompt)
        self._outputs.observe(usage.output)
        if first and usage.output > 1:
            self._each.observe((seconds - first) / (usage.output - 1))

    def rejected(self, reason: str) -> None:
        """Not taken at all. `reason` is one of ours, never a client's text."""
        self._refused.labels(reason).inc()

    def text(self) -> bytes:
        """All series, in Prometheus' text format (CONTENT_TYPE)."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line)  # when a series was made

    # ---- making and growing -------------------------------------------------------------
    def _grow(self, series: dict[str, tuple[str, str]], source: Any) -> None:
        """By what the field grew. A source that began again at 0 has grown by all it says."""
        for name, (field, _) in series.items():
            value, before = getattr(source, field), self._last.get(name, 0)
            self._counters[name].inc(value - before if value >= before else value)
            self._last[name] = value

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, help, labels, registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def _times(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help, buckets=buckets, registry=self.registry)
