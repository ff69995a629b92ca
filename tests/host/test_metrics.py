"""Series that dashboards read, and the log line of a second."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trine import log
from trine.core.messages import Ready
from trine.core.stats import StepStats
from trine.core.types import Usage
from trine.engine.client import Counts
from trine.metrics import COUNTERS, FAULTS, GAUGES, Metrics


def read(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the page, parsed as Prometheus does."""
    return {
        (sample.name.removeprefix("trine_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def plain(metrics: Metrics) -> dict[str, float]:
    return {name: value for (name, labels), value in read(metrics).items() if not labels}


STATS = StepStats(
    step=9, seconds=0.25, rows=3, tokens=40, running=3, waiting=2, pages=100, held=25, cached=10,
    reserved_tokens=400, used_tokens=390, prompt_tokens=500, hit_tokens=200, computed_tokens=350,
    output_tokens=50, preemptions=4, finished=6, aborted=1, idle_seconds=1.5,
)  # fmt: skip


def test_step_stats_become_series() -> None:
    metrics = Metrics()
    metrics.step(STATS)
    found = plain(metrics)
    assert found["num_requests_running"] == 3 and found["num_requests_waiting"] == 2
    assert found["kv_cache_usage_perc"] == 0.25 and found["kv_waste_ratio"] == pytest.approx(0.025)
    assert found["prefix_cache_queries_total"] == 500 and found["prefix_cache_hits_total"] == 200
    assert found["computed_tokens_total"] == 350 and found["num_preemptions_total"] == 4
    assert found["device_idle_seconds_total"] == 1.5
    metrics.step(STATS)
    assert plain(metrics) == found


def test_counters_of_a_new_engine_are_added_and_never_go_back() -> None:
    metrics = Metrics()
    metrics.step(STATS)
    metrics.step(StepStats(prompt_tokens=10))
    metrics.step(StepStats(prompt_tokens=15, pages=100))
    found = plain(metrics)
    assert found["prefix_cache_queries_total"] == 515 and found["prefix_cache_hits_total"] == 200
    assert found["num_requests_running"] == 0 and found["kv_waste_ratio"] == 0


def test_every_field_of_the_sources_exists() -> None:
    fields = {f.name for f in msgspec.structs.fields(StepStats)}
    assert {field for field, _ in (GAUGES | COUNTERS).values()} <= fields
    assert {field for field, _ in FAULTS.values()} == {f.name for f in msgspec.structs.fields(Counts)}


def test_timings_of_requests() -> None:
    metrics = Metrics()
    metrics.first_token(0.3)
    metrics.tokens(4)
    metrics.token(0.02)
    metrics.token(0.06, count=2)
    metrics.finished("stop", 1.3, Usage(prompt=20, cached=16, output=5), first=0.3)
    metrics.finished("something new", 1.0)
    metrics.rejected("queue_full")
    found, named = plain(metrics), read(metrics)
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.08)
    assert found["generation_tokens_total"] == 4
    assert found["prompt_tokens_total"] == 20 and found["prompt_tokens_cached_total"] == 16
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(0.25)
    assert found["e2e_request_latency_seconds_count"] == 2
    assert found["request_generation_tokens_sum"] == 5
    reasons = {k[1][0][1]: v for k, v in named.items() if k[0] == "request_success_total"}
    assert reasons == {"stop": 1, "length": 0, "abort": 0, "error": 1}
    assert named["admission_rejections_total", (("reason", "queue_full"),)] == 1


def test_faults_and_starts() -> None:
    metrics = Metrics()
    metrics.engine(Counts(restarts=2, bad_frames=5))
    metrics.engine(Counts(restarts=3, bad_frames=5))
    for pages in (50, 40):
        metrics.started(Ready(1, "m", 10, [], 100, 8, 16, pages, [], {"load": 1.5}))
    found, named = plain(metrics), read(metrics)
    assert found["engine_restarts_total"] == 3 and found["dropped_frames_total"] == 5
    assert named["startup_seconds", (("phase", "load"),)] == 1.5
    assert [k[1] for k in named if k[0] == "cache_config_info"] == [
        (("num_pages", "40"), ("page_size", "16"))
    ]


def test_two_in_one_process_do_not_mix_and_nothing_is_registered_globally() -> None:
    from prometheus_client import REGISTRY

    one, two = Metrics(), Metrics()
    one.tokens(3)
    assert plain(two)["generation_tokens_total"] == 0
    assert not [f.name for f in REGISTRY.collect() if f.name.startswith("trine")]


# ---- the log ------------------------------------------------------------------------------
@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger("trine")
    before = logger.handlers[:], logger.level, logger.propagate
    made = io.StringIO()
    log.setup("info", made)
    yield made
    logger.handlers[:], logger.level, logger.propagate = before


def test_setting_up_twice_says_things_once(stream: io.StringIO) -> None:
    log.setup("warning", stream)
    logging.getLogger("trine.x").warning("once")
    logging.getLogger("trine.x").info("not at all")
    assert stream.getvalue().count("once") == 1 and "not at all" not in stream.getvalue()


def test_nobody_can_forge_a_line(stream: io.StringIO) -> None:
    logging.getLogger("trine.x").info("id %s", "a\n2026 ERROR trine: forged\r\x1b[31m\x00\u2028")
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().rstrip("\n").isprintable()


def test_a_traceback_keeps_its_lines(stream: io.StringIO) -> None:
    try:
        raise ValueError("a\x1b[31m")
    except ValueError:
        logging.getLogger("trine.x").exception("it failed")
    assert len(stream.getvalue().splitlines()) > 2 and "\x1b" not in stream.getvalue()


def test_one_line_a_second_under_load_and_none_when_idle(stream: io.StringIO) -> None:
    line = log.StatsLine()
    for tenth in range(31):
        line.feed(StepStats(running=4, pages=10, held=5, output_tokens=tenth * 20), now=tenth / 10)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and all("4 running" in one and "200 tokens/s out" in one for one in lines)
    for tenth in range(31, 60):
        line.feed(StepStats(output_tokens=600), now=tenth / 10)
    line.feed(StepStats(running=1, output_tokens=600), now=6.0)
    line.feed(StepStats(running=1, output_tokens=700), now=7.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and "100 tokens/s out" in lines[-1]
