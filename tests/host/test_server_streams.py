"""Streams end once and well, and what a client leaves behind is gone at once."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.server import ScriptedEngine, call, decoded, face, is_refusal, tokenizer, victims
from trine.core.types import Logprob, Output
from trine.errors import EngineDead, Overloaded
from trine.metrics import Metrics
from trine.server import limits, sse
from trine.server.ask import Delta
from trine.server.catalogue import Gone
from trine.server.choice import Choice, merge
from trine.text.detokenizer import Detokenizer
from trine.text.stops import Stops

WORDS = tokenizer()
CHAT = {"messages": [{"role": "user", "content": "hello"}], "seed": 3, "max_tokens": 60, "ignore_eos": True}
PATH = "/v1/chat/completions"


class Client:
    """An ASGI client that leaves, stalls, or listens, when told."""

    def __init__(self, app: Any, body: Any, path: str = PATH) -> None:
        self.app, self.path, self.raw = app, path, msgspec.json.encode(body)
        self.sent: list[Any] = []
        self.gone, self.stalled, self.severed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.asked = False
        self.fail_at = -1  # the send that raises

    async def run(self) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"),
                   (b"content-length", str(len(self.raw)).encode())]  # fmt: skip
        scope = {"type": "http", "method": "POST", "scheme": "http", "path": self.path,
                 "raw_path": self.path.encode(), "query_string": b"", "headers": headers, "server": None,
                 "state": {"sever": self.severed.set}}  # fmt: skip
        await self.app(scope, self.receive, self.send)

    async def receive(self) -> Any:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": self.raw, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) == self.fail_at:
            self.fail_at = -1
            raise OSError("the connection is broken")
        if self.stalled.is_set():
            await self.severed.wait()
            raise OSError("severed")
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


def terminals(raw: bytes) -> list[str]:
    """The terminal events of a stream; nothing comes after one."""
    events = [event for event in raw.split(b"\n\n") if event]
    found = [
        "done" if e == b"data: [DONE]" else "error" for e in events if b"[DONE]" in e or b"event: error" in e
    ]
    assert not found or b"[DONE]" in events[-1] or b"event: error" in events[-1]
    return found


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_everything_at_once(stream: bool, n: int) -> None:
    async def run() -> None:
        app, service, engine = face()
        client = Client(app, CHAT | {"stream": stream, "n": n})
        task = asyncio.create_task(client.run())
        while sum(script.made for script in engine.live.values()) < 3 * n:
            await asyncio.sleep(0)
        engine.gate.clear()
        await turns(20)
        live = set(engine.live)
        client.gone.set()
        await turns(2)
        assert set(engine.aborted) == live and len(engine.aborted) == n, "in the turn in which it is known"
        await task
        assert not engine.live and not service.live and not service.jobs and service.idle.is_set()

    asyncio.run(run())


def test_a_client_that_leaves_before_its_prompt_is_read_asks_for_nothing() -> None:
    async def run() -> None:
        app, service, engine = face()
        rendering = asyncio.Event()

        async def forever(*_: Any, **__: Any) -> Any:
            rendering.set()
            await asyncio.Event().wait()

        service.template.arender = forever
        client = Client(app, CHAT)
        task = asyncio.create_task(client.run())
        await rendering.wait()
        client.gone.set()
        await task
        assert not engine.requests and not service.live and not client.sent

    asyncio.run(run())


def test_cut_at_any_moment_nothing_is_left() -> None:
    async def run() -> None:
        app, service, engine = face()
        rng, base = random.Random(0), len(asyncio.all_tasks())
        async with victims(app):
            for i in range(150):
                client = Client(app, CHAT | {
                    "stream": i % 2 == 0, "n": 1 + i % 3, "logprobs": i % 5 == 0, "stop": ["stop"] if i % 7 else None,
                })  # fmt: skip
                task = asyncio.create_task(client.run())
                await turns(rng.randrange(60))
                client.gone.set()
                await task
                if client.sent and i % 2 == 0:
                    assert len(terminals(client.body)) <= 1
        await turns(50)
        assert len(asyncio.all_tasks()) == base
        assert not engine.live and not service.live and not service.jobs

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 2])
def test_an_exception_anywhere_in_the_engine_is_one_error_event(n: int) -> None:
    async def run() -> None:
        app, service, engine = face()
        ends: set[str] = set()
        for at in range(50 * n):
            calls = 0

            def trouble(request: Any, made: int, at: int = at) -> Output | None:
                nonlocal calls
                calls += 1
                if calls - 1 != at:
                    return None
                match at % 4:
                    case 0:
                        raise RuntimeError("at /work/secret.py 0x1234")
                    case 1:
                        raise EngineDead("Traceback /work/secret.py")
                    case 2:
                        return Output(request.id, [], finished="error", error="poisoned")
                    case _:
                        return Output(request.id, [], finished="abort")

            engine.trouble = trouble
            client = Client(app, CHAT | {"stream": True, "n": n})
            await client.run()
            ends.update(found := terminals(client.body))
            assert len(found) == 1 and b"secret" not in client.body
            if found == ["error"]:
                raw = client.body.rpartition(b"data: ")[2]
                is_refusal(decoded_status(raw), raw)
            assert not engine.live and not service.live
        assert ends == {"done", "error"}

    asyncio.run(run())


def decoded_status(raw: bytes) -> int:
    from trine.server.catalogue import CATALOGUE

    return CATALOGUE[decoded(raw)["error"]["code"]].status


def test_an_exception_at_any_send_frees_everything() -> None:
    async def run() -> None:
        app, service, engine = face()
        for stream in (True, False):
            for at in range(25):
                client = Client(app, CHAT | {"stream": stream})
                client.fail_at = at
                await asyncio.gather(client.run(), return_exceptions=True)
                assert not engine.live and not service.live
                assert len(terminals(client.body)) <= stream

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [RuntimeError("/work/x"), Overloaded("full", 2.5), EngineDead("gone"), ValueError()]
)
def test_what_goes_wrong_before_the_stream_is_a_status(error: Exception) -> None:
    async def run() -> None:
        app, service, _ = face()

        async def arender(*_: Any, **__: Any) -> Any:
            raise error

        service.template.arender = arender
        for stream in (True, False):
            done = await call(app, "POST", PATH, CHAT | {"stream": stream})
            is_refusal(done.status, done.content)
            assert done.status == {Overloaded: 429, EngineDead: 503}.get(type(error), 500)
            if done.status == 429:
                assert done.headers["retry-after"] == "3"
        service.template = None
        done = await call(app, "POST", PATH, CHAT)
        assert is_refusal(done.status, done.content) == "no_chat_template"

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(limits, "STALL_SECONDS", 0.01)
        app, service, engine = face()
        client = Client(app, CHAT | {"stream": True, "max_tokens": 400})
        task = asyncio.create_task(client.run())
        while not client.sent:
            await asyncio.sleep(0)
        engine.gate.clear()
        client.stalled.set()
        engine.gate.set()
        await client.severed.wait()
        await asyncio.gather(task, return_exceptions=True)
        assert not engine.live and not service.live

    asyncio.run(run())


def test_a_slow_reader_gets_larger_pieces_of_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        app, _, engine = face()
        quick = Client(app, CHAT | {"stream": True})
        await quick.run()
        slow = Client(app, CHAT | {"stream": True})
        send = slow.send

        async def slowly(message: Any) -> None:
            await turns(40)
            await send(message)

        slow.send = slowly  # type: ignore[method-assign]
        await slow.run()
        assert said(slow.body) == said(quick.body) and len(slow.sent) < len(quick.sent)
        monkeypatch.setattr(limits, "LAG_TOKENS", 10)
        lagging = Client(app, CHAT | {"stream": True})
        send = lagging.send
        lagging.send = slowly  # type: ignore[method-assign]
        await lagging.run()
        assert terminals(lagging.body) == ["error"] and b"slow_reader" in lagging.body
        assert not engine.live

    asyncio.run(run())


def said(raw: bytes) -> str:
    events = [decoded(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content", "") for e in events for choice in e["choices"])


def test_a_silent_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        app, _, engine = face()
        plain = Client(app, CHAT | {"stream": True})
        await plain.run()
        monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.001)
        engine.gate.clear()
        client = Client(app, CHAT | {"stream": True})
        task = asyncio.create_task(client.run())
        while client.body.count(b": still working\n\n") < 3:
            await asyncio.sleep(0.001)
        engine.gate.set()
        await task
        assert said(client.body) == said(plain.body) and terminals(client.body) == ["done"]

    asyncio.run(run())


def test_a_full_queue_is_a_429_with_an_honest_time() -> None:
    async def run() -> None:
        now = [0.0]
        engine = ScriptedEngine(WORDS, max_num_seqs=2)
        app, service, _ = face(engine, max_queue=1, clock=lambda: now[0])
        engine.gate.clear()
        tasks = [asyncio.create_task(call(app, "POST", PATH, CHAT)) for _ in range(3)]
        while len(engine.live) < 3:
            await asyncio.sleep(0)
        done = await call(app, "POST", PATH, CHAT)
        assert done.status == 429 and is_refusal(429, done.content) == "rate_limit_exceeded"
        assert 1 <= int(done.headers["retry-after"]) <= 600
        done = await call(app, "POST", PATH, CHAT | {"n": 4})
        assert is_refusal(done.status, done.content) == "too_many_choices", "it would never fit"
        engine.gate.set()
        assert {task.status for task in await asyncio.gather(*tasks)} == {200}
        assert (await call(app, "POST", PATH, CHAT)).status == 200
        service.ends = deque([0.0, 10.0, 20.0])
        now[0] = 20.0
        assert service.wait(1) == 10.0 and service.wait(3) == 30.0, "one ends each 10 s"
        now[0] = 40.0
        assert service.wait(1) == 20.0, "and nothing has ended for a while"

    asyncio.run(run())


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    async def run() -> None:
        app, service, engine = face(request_timeout=0.01)
        engine.gate.clear()
        for stream in (False, True):
            done = await call(app, "POST", PATH, CHAT | {"stream": stream})
            assert b"request_timeout" in done.content and done.status == (200 if stream else 504)
            assert not engine.live and not service.live
            assert engine.aborted == [request.id for request in engine.requests]

    asyncio.run(run())


def test_one_label_for_many_requests_mixes_nothing_up() -> None:
    async def run() -> None:
        app, service, engine = face(ScriptedEngine(WORDS, max_num_seqs=128))
        alone = {}
        for seed in range(32):
            alone[seed] = (await call(app, "POST", PATH, CHAT | {"seed": seed})).json()["choices"]
        label = {"x-request-id": "same"}
        leavers = [Client(app, CHAT | {"seed": seed, "stream": True}) for seed in range(32)]
        left = [asyncio.create_task(client.run()) for client in leavers]
        stay = [asyncio.create_task(call(app, "POST", PATH, CHAT | {"seed": s}, label)) for s in range(32)]
        await turns(10)
        for client in leavers:
            client.gone.set()
        again = [asyncio.create_task(call(app, "POST", PATH, CHAT | {"seed": s}, label)) for s in range(32)]
        for tasks in (stay, again):
            found = await asyncio.gather(*tasks)
            assert [reply.json()["choices"] for reply in found] == list(alone.values())
            assert {reply.headers["x-request-id"] for reply in found} == {"same"}
            assert len({reply.json()["id"] for reply in found}) == 32
        await asyncio.gather(*left)
        assert not engine.live and not service.live

    asyncio.run(run())


def test_metrics_count_what_clients_got() -> None:
    async def run() -> None:
        metrics = Metrics()
        app, _, engine = face(meter=metrics)
        done = await call(app, "POST", PATH, CHAT | {"n": 2})
        tokens = done.json()["usage"]["completion_tokens"]
        await call(app, "POST", PATH, CHAT | {"stop": "stop", "max_tokens": 400})
        await call(app, "POST", PATH, {})
        client = Client(app, CHAT)
        engine.gate.clear()
        task = asyncio.create_task(client.run())
        while not engine.live:
            await asyncio.sleep(0)
        client.gone.set()
        await task
        text = (await call(app, "GET", "/metrics")).content.decode()
        assert 'trine_request_success_total{finished_reason="length"} 2.0' in text and tokens == 120
        assert 'trine_request_success_total{finished_reason="stop"} 1.0' in text
        assert 'trine_request_success_total{finished_reason="abort"} 1.0' in text  # it went away
        assert 'trine_request_success_total{finished_reason="error"} 0.0' in text
        assert 'trine_admission_rejections_total{reason="missing_field"} 1.0' in text
        assert "trine_time_to_first_token_seconds_count 3.0" in text

    asyncio.run(run())


TEXTS = st.text("abst op🙂é\n", max_size=30)


@settings(max_examples=120, deadline=None)
@given(
    text=TEXTS,
    stops=st.lists(st.text("abst op🙂", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    reads=st.integers(1, 5),
    ending=st.sampled_from(["stop", "length"]),
)
def test_however_it_is_cut_a_choice_is_the_same(
    text: str, stops: list[str], cuts: list[int], reads: int, ending: str
) -> None:
    ids = WORDS.encode(text) + ([WORDS.eos[0]] if ending == "stop" else [])
    whole = choice_of(ids, [len(ids) or 1], stops, ending, 1)
    parts = choice_of(ids, cuts, stops, ending, reads)
    assert whole == parts
    hits = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, size = min(hits, default=(len(text), 0))
    assert whole.text == text[: end + size]
    assert b"".join(WORDS.token_bytes(token.id) for token in whole.tokens).decode() == whole.text or hits


def choice_of(ids: list[int], cuts: list[int], stops: list[str], ending: str, reads: int) -> Delta:
    """All that a choice gives of `ids` in pieces of the sizes `cuts`."""
    choice = Choice(0, Detokenizer(WORDS), Stops(stops) if stops else None, min_tokens=0, logprobs=True)
    found, rest, turn = Delta(0), ids, 0
    while choice.finished is None:
        size = cuts[turn % len(cuts)]
        piece, rest, turn = rest[:size], rest[size:], turn + 1
        last = ending if not rest else None
        merge(found, choice.feed(Output("x", piece, last, [Logprob(token, -1.0, 1) for token in piece])))
    assert choice.count <= len(ids)
    return found


def test_an_error_that_nobody_waits_for_any_more_is_seen() -> None:
    """A reader goes in the turn in which the stream fails: the event loop has nothing to complain of."""
    complaints: list[dict[str, object]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        gate = asyncio.Event()

        async def events():
            yield b"first"
            try:
                await gate.wait()
            finally:
                raise Gone

        paced = sse._paced(events())
        assert await anext(paced) == b"first"
        waiting = asyncio.ensure_future(anext(paced))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.set()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        del waiting, paced
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert complaints == []
