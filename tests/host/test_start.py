"""What a start must not import or do, because the first answer waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kit import gguf_file as kit
from tests.kit.imports import HEAVY, modules
from tests.kit.process import SCRIPT, ask, made, read, tokens
from trine import registry
from trine.config import Config
from trine.engine.client import EngineClient
from trine.engine.spawn import early, spawn
from trine.flags import Help, fields
from trine.loader import header
from trine.server import run

SERVER = """
from trine.cli import parser, read
config = read(parser().parse_args(["serve", "smollm2", "--port", "1"]))
import trine.engine.spawn, trine.loader.fetch, trine.server.run
from trine.registry import find
find("server.apis")
"""


def test_a_server_imports_nothing_heavy() -> None:
    assert not HEAVY & modules(SERVER)


def test_what_an_engine_imports_before_torch_is_light() -> None:
    """Of the interpreter's own too: torch waits for these."""
    found = modules("import trine.engine.loop, trine.engine.start, trine.loader.gguf")
    assert not (HEAVY | {"asyncio", "argparse", "uvicorn", "tokenizers", "importlib.metadata"}) & found


def test_what_starts_an_engine_is_lighter_still() -> None:
    found = modules("import trine.engine.spawn")
    assert not (HEAVY | {"asyncio", "zmq", "uvicorn", "tokenizers", "logging"}) & found


def test_flags_are_made_without_looking_for_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from trine import flags
    from trine.cli import parser

    def never(kind: str) -> list[str]:
        raise AssertionError(f"{kind} was looked up")

    monkeypatch.setattr(flags, "names", never)
    monkeypatch.setattr(flags, "summaries", never)
    assert parser().parse_args(["serve", "smollm2"]).model_positional == "smollm2"
    with pytest.raises(AssertionError, match="was looked up"):
        parser().parse_args(["serve", "--help"])


def test_help_is_its_words_until_it_is_shown() -> None:
    field = next(field for field in fields() if field.name == "policy")
    assert Help(field) == field.told
    assert Help(field) % {} == f"{field.help} (default: {field.default})"


def test_one_plugin_is_had_without_the_others() -> None:
    """Kernels of a kind may each want a library of their own."""
    found = modules("from trine.registry import get; get('scheduler.policies', 'fcfs')")
    ours = {name.rpartition(".")[2] for name in found if name.startswith("trine.scheduler.policies.")}
    assert ours - {"base"} == {"fcfs"} and len(registry.names("scheduler.policies")) > 1


def test_a_header_is_read_once_while_its_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trine import sandbox

    calls = []

    class Counted(sandbox.Sandbox):
        def call(self, task: str, payload: object, **limits: float) -> object:
            calls.append(payload)
            return super().call(task, payload, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr(sandbox, "Sandbox", Counted)
    header.forget()
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(kit.small()))
    first = header.read_safely(path)
    assert header.read_safely(path) is first and len(calls) == 1
    path.write_bytes(bytes(kit.small(version=2)))
    os.utime(path, ns=(1, 1))
    assert header.read_safely(path).version == 2 and len(calls) == 2
    header.forget()
    assert header.read_safely(path).version == 2 and len(calls) == 3
    header.forget()


def test_an_engine_without_orders_ends_with_who_wanted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing came of it"), early() as process:
        assert process.poll() is None
        raise ValueError("nothing came of it")
    assert process.poll() is not None


def test_an_engine_whose_orders_never_come_says_so() -> None:
    """Its standard input ends when its parent does."""
    with early() as process:
        assert process.stdin and process.stdout
        process.stdin.close()
        assert b"before the orders were whole" in process.stdout.read()
        assert process.wait(60) != 0


def test_a_process_that_waits_is_the_first_engine() -> None:
    async def body() -> None:
        client = made()
        process = subprocess.Popen(
            client._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        client._process = process
        starting = asyncio.create_task(client.start())  # two ask for it, and there is one
        ready = await client.start()
        assert ready.pid == process.pid and (await starting) is ready
        assert len(tokens(await read(client, ask("a", length=5)))) == 5
        await client.close()
        assert process.poll() is not None

    asyncio.run(body())


def test_a_start_that_is_left_is_no_start() -> None:
    async def body() -> None:
        client = made()
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        life = client._life
        assert life is None or life.process is None or life.process.poll() is not None
        assert client.health.reason == "closed"

    asyncio.run(body())


def test_who_is_told_to_end_while_it_opens_the_model_ends_and_tidies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts before the server can be asked, so there is something to tidy already."""
    folders, answered = [], []

    def told(config: Config, path: Path) -> None:
        """What opens the tokenizer takes so long that the signal comes first."""
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(60)

    async def body() -> int:
        process = spawn((sys.executable, SCRIPT))
        try:
            return await run._serve(Config(), Path("/nowhere"), lambda *_: answered.append(1), process)
        finally:
            assert process.poll() is not None

    real, ended = EngineClient.close, threading.Event()

    async def close(self: EngineClient) -> None:
        folders.append(self.folder.path)
        ended.set()
        await real(self)

    monkeypatch.setattr(EngineClient, "close", close)
    monkeypatch.setattr(run, "_tokenizer", told)
    assert asyncio.run(body()) == 0
    assert folders and not answered and not any(folder.exists() for folder in folders)
