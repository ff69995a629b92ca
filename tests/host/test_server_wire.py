"""A real server on a loopback socket: what is not quite HTTP, the two listeners, and the end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit.server import ScriptedEngine, Template, is_refusal, tokenizer, victims
from trine.config import Config
from trine.errors import ConfigError
from trine.server import limits
from trine.server.run import Front, address, check_address, listen, listen_unix, loop_factory, loopback
from trine.server.service import Service

KEY = "a-key"
WORDS = tokenizer()
BODY = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
CHAT = {"messages": [{"role": "user", "content": "hello"}], "seed": 3, "max_tokens": 60, "ignore_eos": True}


class Server:
    """A Front over a scripted engine, and ways to talk to it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.config = Config(port=0, api_key=(KEY,), max_body_bytes=65_536, **options)
        self.engine = ScriptedEngine(WORDS)
        self.service = Service(self.engine, WORDS, Template(), model="test")
        self.admin = folder / "admin"
        self.front = Front(self.config, self.service, self.admin)
        self.ready = asyncio.Event()
        self.port = 0

    def announce(self, _: Any, where: str, __: Config) -> None:
        self.port = int(where.rpartition(":")[2])
        self.ready.set()

    async def raw(self, sent: bytes, more: list[bytes] | None = None) -> bytes:
        """All that comes back until the server closes, or has answered and is silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            for part in more or []:
                writer.write(part)
                await writer.drain()
            return await answer(reader)
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """One answer with its body, or what came before the connection closed."""
    head = b""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"\r\ncontent-length: " in head.lower():
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            return head + await reader.readexactly(size)
        return head + await reader.read()
    except asyncio.IncompleteReadError as error:
        return head + error.partial
    except ConnectionError:
        return head


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[Server]:
    server = Server(folder, **options)
    task = asyncio.create_task(server.front.run(server.engine, server.announce))
    await asyncio.wait(
        [task, asyncio.ensure_future(server.ready.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    try:
        yield server
    finally:
        server.front.stop()
        server.front.stop()
        assert await task == 0
    assert not server.admin.exists() and not server.engine.live


def request(
    line: str = "GET /health HTTP/1.1", *fields: str, body: bytes = b"", host: str = "localhost"
) -> bytes:
    head = [line, f"Host: {host}", *fields]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


AUTH = f"Authorization: Bearer {KEY}"
JSON = "Content-Type: application/json"
POST = "POST /v1/completions HTTP/1.1"
CHUNKED = "Transfer-Encoding: chunked"
LENGTH = f"Content-Length: {len(BODY)}"

TABLE: list[tuple[str, bytes, set[int]]] = [
    ("plain", request(), {200}),
    ("no key", request("GET /v1/models HTTP/1.1"), {401}),
    ("with the key", request("GET /v1/models HTTP/1.1", AUTH), {200}),
    ("a post", request(POST, AUTH, JSON, LENGTH, body=BODY), {200}),
    ("head", request("HEAD /health HTTP/1.1", "Connection: close"), {200}),
    ("lower-case header names", request("GET /v1/models HTTP/1.1", AUTH.replace("Auth", "aUTH")), {200}),
    # hosts
    *((f"host {host!r}", request("GET /v1/models HTTP/1.1", host=host), {400, 401, 421, 431})
      for host in ("a/x?", "a?", "a#", "", "evil.example", "x" * 65_536, "a\x00b", "localhost, localhost", "\t")),
    ("two hosts", request("GET /v1/models HTTP/1.1", "Host: localhost"), {400, 421}),
    ("no host", b"GET /v1/models HTTP/1.1\r\n\r\n", {400, 421}),
    ("no host in 1.0", b"GET /v1/models HTTP/1.0\r\n\r\n", {421}),
    ("absolute form", request("GET http://localhost/v1/models HTTP/1.1"), {400}),
    ("absolute form of another", request("GET http://evil.example/v1/models HTTP/1.1", AUTH), {400}),
    ("a whole proxy request", request("CONNECT localhost:80 HTTP/1.1"), {400}),
    ("asterisk form", request("OPTIONS * HTTP/1.1"), {400}),
    # targets
    *((f"target {path!r}", request(f"GET {path} HTTP/1.1", AUTH), {400, 404})
      for path in ("//v1/models", "/V1/models", "/v1/../v1/models", "/v1/./models", "/v1/%6dodels", "/v1/models;x",
                   "/v1/models.", "/v1/models/%2e%2e/%2e%2e/server_info", "/server_info", "/flush_cache", "\\v1\\models",
                   "v1/models", "/v1/models%00", "/\x7f", "/\xe9", "/v1/models#x", "/" + "a" * 20_000)),
    ("a query is not part of the path", request("GET /v1/models?x=/health HTTP/1.1", AUTH), {200}),
    ("nor does it open a door", request("GET /v1/models?/health HTTP/1.1"), {401}),
    # syntax
    ("no version", b"GET /health\r\n\r\n", {400, 421}),
    ("another protocol", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500, {400}),
    ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    ("HTTP/9.9", request("GET /health HTTP/9.9"), {400}),
    ("made-up method", request("MADEUP /health HTTP/1.1"), {400, 404}),
    ("a header without a colon", request("GET /health HTTP/1.1", "nonsense"), {400}),
    ("space before the colon", request("GET /health HTTP/1.1", "X : y"), {400}),
    ("a folded header", request("GET /health HTTP/1.1", "X: y\r\n z"), {200, 400}),
    ("bare line feed in a header", request("GET /health HTTP/1.1", "X: a\rb"), {400}),
    ("NUL in a header", request("GET /health HTTP/1.1", "X: a\x00b"), {400}),
    # bodies
    ("two lengths", request(POST, AUTH, JSON, LENGTH, "Content-Length: 5", body=BODY), {400}),
    ("length and chunks", request(POST, AUTH, JSON, LENGTH, CHUNKED, body=BODY), {400}),
    ("odd transfer encoding", request(POST, AUTH, JSON, "Transfer-Encoding: xchunked", body=BODY), {400, 415}),
    ("chunks last, not", request(POST, AUTH, JSON, "Transfer-Encoding: chunked, gzip", body=BODY), {400}),
    ("a negative length", request(POST, AUTH, JSON, "Content-Length: -1", body=BODY), {400}),
    ("a huge length", request(POST, AUTH, JSON, "Content-Length: 99999999999999999999", body=BODY), {400, 413}),
    ("a length too large", request(POST, AUTH, JSON, "Content-Length: 65537"), {413}),
    ("a huge chunk", request(POST, AUTH, JSON, CHUNKED, body=b"FFFFFFFFFFFFFFFF\r\nx"), {400, 408, 413}),
    ("a huger chunk", request(POST, AUTH, JSON, CHUNKED, body=b"1" + b"0" * 40 + b"\r\nx"), {400, 413}),
    ("a chunk of what", request(POST, AUTH, JSON, CHUNKED, body=b"zz\r\nx"), {400}),
    ("a chunk without an end", request(POST, AUTH, JSON, CHUNKED, body=b"1\r\nxyz\r\n"), {400}),
    ("form data", request(POST, AUTH, "Content-Type: text/plain", LENGTH, body=BODY), {415}),
    # headers
    ("17 KiB of header", request("GET /health HTTP/1.1", "X: " + "y" * 17_000), {431}),
    ("1 MiB of header", request("GET /health HTTP/1.1", "X: " + "y" * 1_000_000), {431}),
    ("101 fields", request("GET /health HTTP/1.1", *(f"x-{i}: y" for i in range(101))), {431}),
    ("100,000 fields", request("GET /health HTTP/1.1", *("x:" for _ in range(100_000))), {431}),
    ("headers without an end", b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000, {431}),
    ("upgrade", request("GET /health HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket"), {200}),
    ("upgrade to h2c", request(POST, AUTH, JSON, LENGTH, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c",
                               "HTTP2-Settings: AAMAAABk", body=BODY), {200}),
]  # fmt: skip


def test_what_is_not_quite_http_is_answered_and_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 1.0)  # for the one body that never comes

    async def run() -> None:
        async with (
            serving(tmp_path) as server,
            victims(server.front.apps[0], {"authorization": f"Bearer {KEY}"}),
        ):
            for name, sent, statuses in TABLE:
                got = await server.raw(sent)
                assert got.startswith(b"HTTP/1.1 "), (name, got)
                status = int(got[9:12])
                assert status in statuses, (name, got)
                if status != 200:
                    head, _, body = got.partition(b"\r\n\r\n")
                    assert b"content-type: application/json" in head.lower(), name
                    is_refusal(status, body)
                assert b"\r\nserver:" not in got.lower()
            rng = random.Random(0)
            for _ in range(50):
                got = await server.raw(rng.randbytes(rng.randrange(1, 2000)) + b"\r\n\r\n")
                assert not got or got.startswith(b"HTTP/1.1 4")

    asyncio.run(run())


def test_chunks_of_every_kind(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as server:
            head = request(POST, AUTH, JSON, CHUNKED)
            padded = BODY + b" " * 10_000
            ones = b"".join(b"1\r\n%c\r\n" % byte for byte in padded) + b"0\r\n\r\n"
            assert (await server.raw(head, [ones])).startswith(b"HTTP/1.1 200")
            extended = b"%x;a=%s\r\n" % (len(BODY), b"b" * 8000) + BODY + b"\r\n0\r\nX-Trailer: y\r\n\r\n"
            assert (await server.raw(head, [extended])).startswith(b"HTTP/1.1 200")
            for flood in (
                b"1;" + b"x" * 2_000_000,  # one extension
                b"1\r\n \r\n" * 200_000,  # framing
                b"0\r\n" + b"X: y\r\n" * 200_000,  # trailers
                b"10000\r\n" + b" " * 65_536 + b"\r\n1\r\n \r\n0\r\n\r\n",  # one byte too many
            ):
                got = await server.raw(head, [flood[i : i + 65_536] for i in range(0, len(flood), 65_536)])
                assert not got or int(got[9:12]) in (400, 413), got
            stolen = b"5\r\nhello\r\n0\r\nAuthorization: Bearer a-key\r\n\r\n"
            got = await server.raw(request(POST, JSON, CHUNKED), [stolen])
            assert got.startswith(b"HTTP/1.1 401"), "a trailer is no header"

    asyncio.run(run())


def test_a_body_is_asked_for_only_when_it_may_come(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as server:
            for fields, first in (((AUTH,), b"HTTP/1.1 100"), ((), b"HTTP/1.1 401")):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(request(POST, JSON, LENGTH, "Expect: 100-continue", *fields))
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(first)
                writer.write(BODY)
                if fields:
                    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
                writer.close()

    asyncio.run(run())


def test_without_a_key_little_of_a_body_is_taken(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as server:
            size = 60_000
            got = await server.raw(request(POST, JSON, f"Content-Length: {size}"), [b" " * size])
            assert got.startswith(b"HTTP/1.1 401") and b"connection: close" in got.lower()

    asyncio.run(run())


def test_pipelined_requests_get_one_answer(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request() * 3)
            got = await reader.read()
            assert got.count(b"HTTP/1.1 200") == 1, (
                "and the connection is closed: the others may be sent again"
            )
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(3):
                writer.write(request())
                assert (await answer(reader)).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(run())


def test_heads_that_do_not_come_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(limits, "HEADER_SECONDS", 0.05)
        monkeypatch.setattr(limits, "BODY_SECONDS", 0.05)
        async with serving(tmp_path) as server:
            assert await server.raw(b"") == b""
            assert (await server.raw(b"GET /health HTTP/1.1\r\nHost: ")).startswith(b"HTTP/1.1 408")
            assert (await server.raw(request(POST, AUTH, JSON, LENGTH, body=b"{"))).startswith(
                b"HTTP/1.1 408"
            )

    asyncio.run(run())


def test_a_client_that_hangs_up_frees_its_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as server:
            for stream in (True, False):
                for piped in (b"", request()):
                    raw = json.dumps(CHAT | {"stream": stream}).encode()
                    server.engine.gate.clear()
                    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                    writer.write(request("POST /v1/chat/completions HTTP/1.1", AUTH, JSON,
                                         f"Content-Length: {len(raw)}", body=raw) + piped)  # fmt: skip
                    while not server.engine.live:
                        await asyncio.sleep(0.001)
                    writer.close()
                    while server.service.live:
                        await asyncio.sleep(0.001)
            assert len(server.engine.aborted) == 4 and not server.engine.live

    asyncio.run(run())


def test_the_official_client_over_a_socket(tmp_path: Path) -> None:
    def chat(port: int) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as api:
            whole = api.chat.completions.create(
                model="test", messages=CHAT["messages"], seed=1, max_tokens=30
            )  # type: ignore[arg-type]
            stream = api.chat.completions.create(
                model="test", messages=CHAT["messages"], seed=1, max_tokens=30, stream=True  # type: ignore[arg-type]
            )  # fmt: skip
            return whole.choices[0].message.content or "", "".join(
                chunk.choices[0].delta.content or "" for chunk in stream
            )

    async def run() -> None:
        async with serving(tmp_path) as server:
            whole, streamed = await asyncio.to_thread(chat, server.port)
            assert whole and whole == streamed

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def test_the_admin_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as server:
            assert stat.S_IMODE(server.admin.stat().st_mode) == 0o600
            reader, writer = await asyncio.open_unix_connection(str(server.admin))
            writer.write(request("GET /server_info HTTP/1.1"))
            got = await answer(reader)
            assert got.startswith(b"HTTP/1.1 200") and KEY.encode() not in got
            writer.write(request("GET /server_info HTTP/1.1", host="evil.example"))
            assert (await answer(reader)).startswith(b"HTTP/1.1 421")
            writer.close()

    for factory in (None, loop_factory()):  # asyncio's loop, and the one that serves
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())


async def start_chat(server: Server, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    raw = json.dumps(CHAT | {"stream": True} | more).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        request("POST /v1/chat/completions HTTP/1.1", AUTH, JSON, f"Content-Length: {len(raw)}", body=raw)
    )
    await reader.readuntil(b"data: ")
    return reader, writer


def test_sigterm_lets_streams_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(tmp_path, drain_seconds=60)
        task = asyncio.create_task(server.front.run(server.engine, server.announce))
        await server.ready.wait()
        server.engine.gate.clear()
        reader, writer = await start_chat(server)
        os.kill(os.getpid(), signal.SIGTERM)
        while not server.service.draining:
            await asyncio.sleep(0.001)
        got = await server.raw(request(POST, AUTH, JSON, LENGTH, body=BODY))
        assert got.startswith(b"HTTP/1.1 503") and b"shutting_down" in got and b"retry-after: 1" in got
        assert (await server.raw(request("GET /ready HTTP/1.1"))).startswith(b"HTTP/1.1 503")
        assert (await server.raw(request())).startswith(b"HTTP/1.1 200")
        server.engine.gate.set()
        assert (await reader.readuntil(b"[DONE]\n\n")).count(b"[DONE]") == 1
        assert await task == 0
        writer.close()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", server.port)

    asyncio.run(run())


@pytest.mark.parametrize("patience", [0, 60])
def test_what_does_not_finish_ends_with_an_error_event(tmp_path: Path, patience: float) -> None:
    async def run() -> None:
        server = Server(tmp_path, drain_seconds=patience)
        task = asyncio.create_task(server.front.run(server.engine, server.announce))
        await server.ready.wait()
        server.engine.gate.clear()
        reader, writer = await start_chat(server)
        server.front.stop()
        if patience:
            server.front.stop()  # a second signal: now
        rest = await reader.read()
        assert rest.count(b"event: error") == 1 and b"shutting_down" in rest and b"[DONE]" not in rest
        assert await task == 0 and not server.engine.live
        writer.close()

    asyncio.run(run())


def test_an_engine_that_is_given_up_ends_the_server(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(tmp_path)
        task = asyncio.create_task(server.front.run(server.engine, server.announce))
        await server.ready.wait()
        server.engine.over.set()
        assert await task == 1

    asyncio.run(run())


def test_health_answers_while_the_engine_starts_and_a_failed_start_is_raised(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(tmp_path)
        ready, begin = server.engine.ready, asyncio.Event()

        async def start() -> Any:
            await begin.wait()
            raise ConfigError("no such model")

        server.engine.ready, server.engine.start = None, start  # type: ignore[method-assign]
        server.config = Config(port=0)
        with listen("127.0.0.1", 0) as taken:
            server.port = taken.getsockname()[1]
        server.front.config = Config(port=server.port)
        task = asyncio.create_task(server.front.run(server.engine, server.announce))
        got = b""
        while not got:
            try:
                got = await server.raw(request("GET /ready HTTP/1.1"))
            except ConnectionError:
                await asyncio.sleep(0.001)
        assert got.startswith(b"HTTP/1.1 503") and b"starting" in got and not server.ready.is_set()
        begin.set()
        with pytest.raises(ConfigError):
            await task
        assert ready

    asyncio.run(run())


def test_addresses_beyond_loopback_need_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "127.0.0.1.example"):
        with pytest.raises(ConfigError, match="api-key"):
            check_address(Config(host=host))
        check_address(Config(host=host, api_key=("x",)))
        check_address(Config(host=host, insecure=True))
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"):
        assert loopback(host)
        check_address(Config(host=host))
    with listen("127.0.0.1", 0) as bound:
        assert address("0.0.0.0", bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
        bound.listen()
        with pytest.raises(ConfigError, match="cannot listen"), listen("127.0.0.1", bound.getsockname()[1]):
            pass
    with pytest.raises(ConfigError, match="admin"), listen_unix(tmp_path / "no" / "such"):
        pass


def test_an_admin_socket_that_is_left_over_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    for _ in range(2):
        with listen_unix(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with listen_unix(path) as bound:
        bound.listen()
        with pytest.raises(ConfigError, match="another"), listen_unix(path):
            pass
