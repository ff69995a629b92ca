"""The bench measures what a scripted server did: arrivals, first token, gaps, usage, errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from trine.bench import serve as bench
from trine.bench.client import Client
from trine.bench.datasets import build
from trine.errors import ConfigError, TrineError


def scripted(request: httpx.Request) -> httpx.Response:
    """Answers with three words, or an error for a prompt that says so."""
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "tiny"}]})
    if request.url.path == "/version":
        return httpx.Response(200, json={"version": "1"})
    body = json.loads(request.content)
    if "fail" in body["messages"][-1]["content"]:
        return httpx.Response(429, json={"error": {"message": "full"}})
    events = [{"choices": [{"delta": {"content": f"w{i} "}}]} for i in range(3)]
    events.append(
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }
    )
    return httpx.Response(
        200, text="".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
    )


def run(monkeypatch: pytest.MonkeyPatch, **load: object) -> dict:
    made = Client.__init__
    monkeypatch.setattr(
        Client,
        "__init__",
        lambda self, *a, **k: made(self, *a, **k | {"transport": httpx.MockTransport(scripted)}),
    )
    return asyncio.run(bench.run(bench.Load(url="http://127.0.0.1:1", **load)))  # type: ignore[arg-type]


def test_a_run_counts_what_the_server_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, requests=5, dataset="shared-prefix", rate=1e6)
    assert (result["completed"], result["failed"], result["model"]) == (5, 0, "tiny")
    assert (result["prompt_tokens"], result["cached_tokens"], result["output_tokens"]) == (35, 20, 15)
    assert set(result["time_to_first_token_seconds"]) == {"mean", "p50", "p90", "p99", "max"}
    assert json.loads(json.dumps(result))["machine"]["cores"]
    assert "5 completed" in bench.table(result)


def test_a_conversation_sends_the_answers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, requests=8, dataset="multi-turn")
    assert result["completed"] == 8


def test_errors_are_counted_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text('{"prompt": "fail", "output": 3}\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    result = run(monkeypatch, requests=4, dataset="jsonl", path=file)
    assert (result["completed"], result["failed"]) == (2, 2)
    assert result["errors"][0].startswith("429")


@pytest.mark.parametrize(
    "text", ["{}", "[]", "nonsense", '{"messages": [{"role": "system", "content": "x"}]}', ""]
)
def test_a_bad_dataset_is_a_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"load\.jsonl"):
        build("jsonl", 1, 8, 8, 0, file)


def test_percentiles_are_of_nearest_rank() -> None:
    assert bench.percentiles([float(i) for i in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert bench.percentiles([]) == {}


def test_the_same_seed_is_the_same_load() -> None:
    assert (
        build("unique", 9, 20, 8, 1, None)
        == build("unique", 9, 20, 8, 1, None)
        != build("unique", 9, 20, 8, 2, None)
    )


def test_no_server_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    made = Client.__init__
    monkeypatch.setattr(
        Client,
        "__init__",
        lambda self, *a, **k: made(self, *a, **k | {"transport": httpx.MockTransport(refuse)}),
    )
    with pytest.raises(TrineError, match="no server answers"):
        asyncio.run(bench.run(bench.Load(url="http://127.0.0.1:1/v1", requests=1)))
    with pytest.raises(ConfigError, match="at least 1"):
        asyncio.run(bench.run(bench.Load(url="http://127.0.0.1:1", requests=0)))
