"""The bench measures what a scripted server did: arrivals, first token, gaps, usage, errors."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest

from tests.kit.engine import fake_engine
from tests.kit.fake import VOCAB
from trine.bench import offline
from trine.bench import serve as bench
from trine.bench.client import Client
from trine.bench.datasets import build
from trine.bench.workload import WORKS, Asked, Work, fixed, totals, warm_up
from trine.core.messages import Ready
from trine.errors import ConfigError, TrineError
from trine.flags import make


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


@pytest.mark.parametrize(
    "name,round,count,tokens,first,last",
    [
        ("w1", 0, 256, (142_827, 133_966), [6311, 6890, 663], [6642, 9046, 1958]),
        ("w2", 0, 200, (102_400, 51_200), [7412, 12004, 11124], [4820, 62076, 29541]),
        ("w3", 0, 256, (557_056, 32_768), [68187, 62726, 21639], [98732, 46544, 36644]),
        ("w3l", 0, 256, (2_129_920, 65_536), [1609, 61548, 14732], [75830, 10059, 46310]),
        ("w4", 2, 1, (512, 256), [83810, 14592, 3278], [14168, 50140, 5075]),
        ("w5", 1, 16, (65_536, 16), [31918, 65825, 72389], [33032, 31215, 49187]),
        ("w7", 50, 50, (25_600, 6_400), [42777, 52290, 24624], [23339, 79923, 32220]),
    ],
)
def test_a_workload_is_the_same_everywhere(
    name: str, round: int, count: int, tokens: tuple[int, int], first: list[int], last: list[int]
) -> None:
    """The figures are of the lists that other engines were measured on."""
    asked = WORKS[name].make(round)
    assert (len(asked), totals(asked)) == (count, tokens)
    assert (asked[0][0][:3], asked[-1][0][-3:]) == (first, last)


def test_warm_up_has_no_tokens_of_a_workload() -> None:
    assert totals(warm_up()[0]) == (13_871, 15_250)
    heads = {tuple(prompt[:20]) for work in WORKS.values() for prompt, _ in work.make(1)}
    assert not heads & {tuple(prompt[:20]) for asked in warm_up() for prompt, _ in asked}


def _start(**options: int):
    engine = fake_engine(max_len=512, **options)
    rows = options.get("slots", 8)
    return engine, Ready(1, "fake", VOCAB, [], 512, rows, 16, 256, [("platform", "fake", "a test")])


def _small(measure: str, **options: object) -> Work:
    def asked(number: int) -> list[Asked]:
        return fixed(number if measure == "steps" else 6, 20, 12, 5)

    return Work("a test", measure, asked, **options)


def _offline(works: dict[str, Work], **options: int) -> dict:
    config = make({})
    return offline.run(config, Path(), works, lambda *_: _start(**options), warm=lambda: [fixed(2, 9, 3, 1)])


@pytest.mark.parametrize("depth", [1, 2])
def test_offline_measures_each_kind_of_workload(depth: int) -> None:
    works = {
        "all": _small("all", warm=lambda: fixed(2, 5, 2, 3)),
        "few": _small("all", together=2),
        "stream": Work("", "stream", lambda i: fixed(1, 20, 12, i), rounds=2),
        "prompts": Work("", "prompts", lambda i: fixed(3, 40, 1, i), rounds=2),
        "steps": _small("steps", rows=(1, 4, 9)),
    }
    result = _offline(works, depth=depth)
    found = {(r["workload"], r.get("rows")): r for r in result["results"]}
    assert found["all", None]["tokens_out"] == 72 and found["all", None]["out_tokens_per_second"] > 0
    assert found["few", None]["limit"] == "2 at a time are asked" and found["few", None]["steps"] >= 36
    assert len(found["stream", None]["all_first_token_ms"]) == 2
    assert found["prompts", None]["prefill_tokens_per_second"] > 0
    assert found["steps", 1]["steps"] == 11 and found["steps", 4]["step_ms_median"] > 0
    assert "at most 8 rows" in found["steps", 9]["skipped"]
    assert result["plan"] == {"platform": "fake"} and json.loads(json.dumps(result))
    assert all(offline.line(r).startswith(r["workload"]) for r in result["results"])


def test_the_engine_itself_limits_how_many_run_where_it_can() -> None:
    assert _offline({"w": _small("all", together=8)})["results"][0]["limit"] == "max_num_seqs 8"


@pytest.mark.parametrize("text,hint", [("w9", "w3l"), ("", "no workload")])
def test_a_workload_that_there_is_not(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        offline.parse(text)


def test_a_workload_that_is_longer_than_the_context_is_refused_before_it_runs() -> None:
    long = Work("", "all", lambda _: fixed(2, 500, 13, 5))
    with pytest.raises(ConfigError, match="513 tokens, and the context holds 512"):
        _offline({"long": long})


@pytest.mark.parametrize(
    "words", ["bench offline m --workload w1 --save", "bench serve --url http://127.0.0.1:1 --result"]
)
def test_a_result_that_cannot_be_written_is_said_before_the_work(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, what lies in a file, a pipe that nobody reads, a name that no file may have."""
    from trine import cli

    def work(*_: object, **__: object) -> None:
        raise AssertionError("it has begun to work")

    monkeypatch.setattr("trine.loader.fetch.locate", work)
    monkeypatch.setattr("trine.bench.serve.run", work)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "file/x.json", "pipe", "x" * 300):
        with pytest.raises(SystemExit) as caught:
            cli.main([*words.split(), str(tmp_path / name)])
        said = capsys.readouterr().err
        assert (
            caught.value.code == 1
            and said.startswith(f"trine: {words.split()[-1]} ")
            and str(tmp_path) in said
        )
        assert "cannot be written" in said and said.count("\n") == 1


def test_asking_whether_a_result_can_be_written_leaves_nothing_and_keeps_what_is_there(
    tmp_path: Path,
) -> None:
    new, old = tmp_path / "a" / "new.json", tmp_path / "old.json"
    old.write_text("what was measured before")
    for path in (new, old):
        bench.writable(path, "save")
    assert not new.exists() and old.read_text() == "what was measured before"
    bench.save({"x": 1}, new, "save")
    assert json.loads(new.read_text()) == {"x": 1}
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        bench.save({"x": 1}, tmp_path, "save")
