"""The engine in a process of its own: streams, aborts, limits, and what a clean stop leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.kit.engine_process import ROWS, VOCAB, Trouble, solo
from tests.kit.process import ask, empty, engine, made, process_of, read, rest, tokens, until
from trine.config import Config
from trine.core.stats import StepStats
from trine.core.types import Output, Request, Sampling
from trine.engine.client import Counts, EngineClient, Limits
from trine.engine.stream import merged
from trine.errors import EngineDead, Overloaded, RequestError
from trine.metrics import Metrics


# ---- streams ------------------------------------------------------------------------------
def test_a_request_gives_what_it_gives_alone() -> None:
    async def body() -> None:
        async with engine() as client:
            outputs = await read(client, request := ask("a"))
            assert tokens(outputs) == solo(request)
            assert outputs[-1].finished == "length" and all(o.id == "a" for o in outputs)
            assert outputs[-1].usage and (outputs[-1].usage.prompt, outputs[-1].usage.output) == (3, 20)
            assert client.health.ok and client.live == 0 and client.waiting == 0

    asyncio.run(body())


def test_many_at_once_and_more_than_rows() -> None:
    async def body() -> None:
        async with engine("--step", "0.0005") as client:
            requests = [ask(f"r{i}", prompt=[i], length=8) for i in range(ROWS + 40)]
            streams = [client.submit(r) for r in requests]
            assert client.waiting == 40
            answers = await asyncio.gather(*map(rest, streams))
            assert [tokens(a) for a in answers] == [solo(r) for r in requests]

    asyncio.run(body())


def test_a_slow_reader_gets_several_outputs_in_one() -> None:
    async def body() -> None:
        async with engine() as client:
            stream = client.submit(request := ask("a", length=10))
            await empty_of_live(client)
            outputs = await rest(stream)
            assert len(outputs) == 1 and outputs[0].tokens == solo(request)
            assert outputs[0].finished == "length"

    asyncio.run(body())


async def empty_of_live(client: EngineClient) -> None:
    while client.live:
        await asyncio.sleep(0.005)


def test_merged_outputs_keep_logprobs_and_the_end() -> None:
    parts = [Output("a", [1], logprobs=[]), Output("a", [2, 3]), Output("a", [], finished="abort")]
    assert merged(parts) == Output("a", [1, 2, 3], finished="abort", logprobs=[])
    assert merged([Output("a", [1]), Output("a", [2])]).logprobs is None


def test_a_request_the_engine_refuses_ends_with_its_words_and_hurts_nobody() -> None:
    async def body() -> None:
        async with engine() as client:
            other = asyncio.create_task(read(client, ask("other")))
            bad = [
                ask("outside", prompt=[VOCAB]),
                ask("negative", prompt=[-1]),
                Request("nan", [1], Sampling(temperature=float("nan"))),
                Request("empty", []),
                ask("bug", prompt=[5]),  # add() raises what nobody expects
            ]
            for request in bad:
                outputs = await read(client, request)
                assert [o.finished for o in outputs] == ["error"] and outputs[0].error, request.id
            assert tokens(await other) == solo(ask("other"))
            assert client.counts == Counts()

    asyncio.run(body())


def test_what_the_client_itself_refuses() -> None:
    async def body() -> None:
        async with engine(max_queue=1) as client:
            first = client.submit(ask("twice", length=1000))
            with pytest.raises(RequestError, match="in use"):
                client.submit(ask("twice"))
            with pytest.raises(RequestError, match="more than a message"):
                client.submit(Request("huge", [1] * 7_000_000))
            others = [client.submit(ask(f"r{i}", length=1000)) for i in range(ROWS)]
            with pytest.raises(Overloaded) as refused:
                client.submit(ask("one too many"))
            assert 1 <= refused.value.seconds <= 60
            for stream in (first, *others):
                stream.close()
            assert tokens(await read(client, ask("after"))) == solo(ask("after"))

    asyncio.run(body())


# ---- aborts -------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["abort", "close", "leave", "cancel", "drop"])
def test_however_a_reader_goes_the_engine_is_free_at_once(way: str) -> None:
    async def body() -> None:
        async with engine() as client:
            stream = client.submit(ask("a", length=100_000))
            await anext(stream)
            match way:
                case "abort":
                    client.abort("a")
                    outputs = await rest(stream)
                    assert outputs[-1].finished == "abort" and outputs[-1].usage
                    assert outputs[-1].usage.output > 0
                case "close":
                    await stream.aclose()
                case "leave":
                    async with aclosing(stream):
                        async for _ in stream:
                            break
                case "cancel":
                    task = asyncio.create_task(rest(stream))
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    del task
                case "drop":
                    del stream
            assert client.live == 0
            stats = await empty(client)
            assert (stats.aborted, stats.finished, stats.held) == (1, 0, 0)
            client.abort("a"), client.abort("never was")
            assert not client._names and not client._streams and not client._replay.records
            assert tokens(await read(client, ask("a"))) == solo(ask("a"))

    asyncio.run(body())


# ---- start and stop -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "phase,words", [("refuse", "^this model is too big"), ("crash", "RuntimeError: no start with 0 keys")]
)  # fmt: skip
def test_a_start_that_fails_says_what_the_engine_said(phase: str, words: str) -> None:
    async def body() -> None:
        client = made("--phase", phase, api_key=("secret",))
        with pytest.raises(EngineDead, match=words):
            await client.start()
        assert not client.health.ok and not client.folder.path.exists()
        with pytest.raises(EngineDead):
            client.submit(ask("a"))

    asyncio.run(body())


def test_a_start_that_takes_too_long_is_ended() -> None:
    async def body() -> None:
        client = made("--phase", "hold", limits=Limits(start=1.0, stop=0.1))
        with pytest.raises(EngineDead, match="not ready after"):
            await client.start()

    asyncio.run(body())


def test_a_program_that_is_no_engine_is_told_by_its_last_words() -> None:
    async def body() -> None:
        client = EngineClient(Config(), Path("/nowhere"), command=(sys.executable, "-c", "1/0"))
        with pytest.raises(EngineDead, match=r"exit status 1\n(?s:.*)ZeroDivisionError"):
            await client.start()

    asyncio.run(body())


def test_a_clean_stop_leaves_nothing_and_ends_the_streams() -> None:
    async def body() -> None:
        client = made()
        await client.start()
        pid = process_of(client)
        stream = client.submit(ask("a", length=100_000))
        await anext(stream)
        await client.close()
        assert not Path(f"/proc/{pid}").exists() and not client.folder.path.exists()
        assert (await rest(stream))[-1].finished == "abort"
        assert await client.ended() is None
        with pytest.raises(EngineDead):
            client.submit(ask("b"))

    asyncio.run(body())


def test_closing_is_always_possible() -> None:
    async def body() -> None:
        never = made()
        await never.close()
        client = made("--phase", "hold")
        starting = asyncio.create_task(client.start())
        await until(lambda: client._life and "phase: hold" in client._life._lines)
        pid = process_of(client)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await client.close()
        await client.close()
        assert not Path(f"/proc/{pid}").exists() and not client.folder.path.exists()

    asyncio.run(body())


def test_commands() -> None:
    async def body() -> None:
        async with engine() as client:
            assert await client.command("flush") is None
            with pytest.raises(RequestError, match="no command is called 'format'"):
                await client.command("format")

    asyncio.run(body())


# ---- what others can see of it ------------------------------------------------------------
def test_no_torch_no_network_no_names_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_API_KEY", "planted-secret")

    async def body() -> None:
        async with engine(api_key=("planted-secret",)) as client:
            process = Path(f"/proc/{process_of(client)}")
            assert b"planted-secret" not in (process / "environ").read_bytes()
            assert b"planted-secret" not in (process / "cmdline").read_bytes()
            own = {link for fd in (process / "fd").iterdir() if (link := _target(fd)).startswith("socket:")}
            for table in ("tcp", "tcp6", "udp", "udp6"):
                lines = (process / "net" / table).read_text().splitlines()[1:]
                assert not own & {f"socket:[{line.split()[9]}]" for line in lines}, table
            folder = client.folder.path
            assert folder.stat().st_mode & 0o777 == 0o700
            assert [path.name for path in folder.iterdir()] == ["lock"]  # no socket to knock at

    asyncio.run(body())


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def test_importing_the_client_and_the_loop_imports_no_torch() -> None:
    code = "import sys, trine.engine.client, trine.engine.loop, trine.engine.start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_health_and_numbers_of_a_busy_engine() -> None:
    class Heard(Metrics):
        steps = 0

        def step(self, stats: StepStats) -> None:
            self.steps += 1
            super().step(stats)

    async def body() -> None:
        heard = Heard()
        async with engine(listener=heard) as client:
            outputs = await asyncio.gather(*(read(client, ask(f"r{i}", length=100)) for i in range(4)))
            left = client.submit(ask("left", length=1000))
            await anext(left)
            left.close()
            await until(lambda: client.stats.aborted)
            assert client.stats.output_tokens > sum(len(tokens(o)) for o in outputs) == 400
            assert 2 <= heard.steps < 100  # far fewer than there were
            assert client.health.ok and client.health.step > 0
            shown = heard.registry.get_sample_value
            assert shown("trine_prefix_cache_queries_total") == 15
            assert shown("trine_cache_config_info", {"page_size": "16", "num_pages": "100"}) == 1
            assert shown("trine_num_requests_running") == 0

    asyncio.run(body())


def test_trouble_ids_are_not_ordinary_tokens() -> None:
    assert all(t < Trouble.RAISE for t in solo(ask("a", length=200)))
