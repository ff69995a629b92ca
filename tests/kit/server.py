"""What stands behind the HTTP face in its tests: a scripted engine, a byte tokenizer, a template."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from string import Formatter
from typing import Any

import msgspec
import tokenizers
from msgspec import Struct
from tokenizers import decoders, models, pre_tokenizers

from trine.config import Config
from trine.core.messages import Ready
from trine.core.stats import StepStats
from trine.core.types import Logprob, Output, Request, Usage
from trine.server.app import make_app
from trine.server.catalogue import CATALOGUE
from trine.server.service import Service
from trine.text.parts import Parts
from trine.text.spelling import byte_letters
from trine.text.tokenizer import Tokenizer

PIECES = ["the ", "é", "🙂", "stop", "\n", "st", "op ", "naïve ", "漢字", "a", "b ", "Z"]
SPECIALS = ["<|im_start|>", "<|im_end|>"]


def tokenizer() -> Tokenizer:
    """A token for each byte, some for two or three, and two control tokens."""
    vocab = byte_letters()
    merges = [("t", "h"), ("th", "e"), ("s", "t"), ("o", "p")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
    size = core.get_vocab_size()
    return Tokenizer(Parts(core=core, vocab=size, longest=16, eos=(size - 1,)))


class Template:
    """ChatML: what the client wrote is not trusted."""

    async def arender(self, messages: list[dict[str, Any]], **options: Any) -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        for message in messages:
            found += [("<|im_start|>", True), (message["role"] + "\n" + message["content"], False)]
            found += [("<|im_end|>", True), ("\n", True)]
        return [*found, ("<|im_start|>", True), ("assistant\n", True)]


class Health(Struct):
    ok: bool = True
    reason: str = "serving"


class ScriptedEngine:
    """Its text is a hash of the prompt and, above temperature 0, of the seed. A turn of the loop
    gives each request one Output of one to three tokens."""

    def __init__(
        self, words: Tokenizer, *, max_model_len: int = 512, max_num_seqs: int = 64, ends: bool = True
    ) -> None:
        self.words, self.ends = words, ends
        self.ready: Ready | None = Ready(
            pid=1,
            model="test",
            vocab=words.vocab,
            eos=list(words.eos),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            page_size=16,
            pages=100,
            plan=[("platform", "script", "a test")],
        )
        self.health, self.stats = Health(), StepStats()
        self.requests: list[Request] = []
        self.live: dict[str, Script] = {}
        self.aborted: list[str] = []
        self.commands: list[str] = []
        self.gate = asyncio.Event()  # outputs wait for it
        self.gate.set()
        self.cached: dict[tuple[int, ...], int] = {}  # of a prompt, tokens the cache had before
        self.trouble: Callable[[Request, int], Output | None] = lambda request, made: None
        self.over = asyncio.Event()

    def submit(self, request: Request) -> Script:
        assert request.id not in self.live
        assert all(0 <= token < self.words.vocab for token in request.tokens)
        self.requests.append(request)
        script = self.live[request.id] = Script(self, request)
        return script

    def abort(self, id: str) -> None:
        if script := self.live.get(id):
            self.aborted.append(id)
            script.told = True
            script.news.set()

    async def command(self, name: str, **values: Any) -> Any:
        self.commands.append(name)

    async def start(self) -> Ready:
        assert self.ready
        return self.ready

    async def ended(self) -> None:
        await self.over.wait()


class Script:
    """The outputs of one request."""

    def __init__(self, engine: ScriptedEngine, request: Request) -> None:
        self.engine, self.request = engine, request
        sampling = request.sampling
        seed = 0 if sampling.temperature == 0 else sampling.seed
        self.key = f"{request.tokens} {seed}"
        self.ids: list[int] = []
        self.made, self.told, self.done = 0, False, False
        self.news = asyncio.Event()

    def __aiter__(self) -> Script:
        return self

    async def __anext__(self) -> Output:
        if self.done:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        while not self.engine.gate.is_set() and not self.told:
            tasks = [asyncio.ensure_future(event.wait()) for event in (self.engine.gate, self.news)]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        output = self._next()
        if output.finished:
            await self.aclose()
        return output

    async def aclose(self) -> None:
        self.done = True
        self.engine.live.pop(self.request.id, None)

    def _next(self) -> Output:
        request, sampling = self.request, self.request.sampling
        if self.told:
            return Output(request.id, [], finished="abort", usage=self._usage())
        if trouble := self.engine.trouble(request, self.made):
            return trouble
        count = min(1 + self._hash("size", self.made) % 3, sampling.max_tokens - self.made)
        tokens: list[int] = []
        finished = None
        while len(tokens) < count and finished is None:
            tokens.append(self._token())
            if tokens[-1] in self._stops():
                finished = "stop"
        if finished is None and self.made == sampling.max_tokens:
            finished = "length"
        logprobs = None if sampling.logprobs is None else [self._logprob(token) for token in tokens]
        return Output(request.id, tokens, finished, logprobs, self._usage() if finished else None)

    def _stops(self) -> tuple[int, ...]:
        sampling = self.request.sampling
        return sampling.stop_ids + (() if sampling.ignore_eos else self.engine.words.eos)

    def _token(self) -> int:
        while len(self.ids) <= self.made:
            draw = self._hash("piece", len(self.ids))
            if self.engine.ends and draw % 23 == 0 and len(self.ids) >= self.request.sampling.min_tokens:
                self.ids.append(self.engine.words.eos[0])
            else:
                self.ids += self.engine.words.encode(PIECES[draw % len(PIECES)])
        self.made += 1
        return self.ids[self.made - 1]

    def _logprob(self, token: int) -> Logprob:
        alternatives = self.request.sampling.logprobs or 0
        top = [((token + i) % 256, -0.5 - i if i < 2 else -math.inf) for i in range(alternatives)]
        return Logprob(token, -0.25 - self._hash("logprob", self.made) % 7, 1, top)

    def _usage(self) -> Usage:
        prompt = self.request.tokens
        first = self.request.id.endswith("-0") or not self.engine.cached
        cached = self.engine.cached.get(tuple(prompt), 0) if first else len(prompt) - 1
        return Usage(len(prompt), cached, self.made)

    def _hash(self, what: str, place: int) -> int:
        raw = hashlib.sha256(f"{what} {place} {self.key}".encode()).digest()
        return int.from_bytes(raw[:6], "little")


def face(engine: ScriptedEngine | None = None, config: Config | None = None, **options: Any) -> Any:
    """(app, service, engine): the public application over a scripted engine."""
    engine = engine or ScriptedEngine(tokenizer())
    config = config or Config(model="test")
    service = Service(engine, engine.words, Template(), model="test", **options)
    return make_app(service, config), service, engine


@asynccontextmanager
async def quiet(engine: ScriptedEngine):
    """Outputs wait while this is open."""
    engine.gate.clear()
    try:
        yield
    finally:
        engine.gate.set()


def decoded(raw: bytes) -> Any:
    return msgspec.json.decode(raw)


LEAKS = re.compile(r"0x[0-9a-f]{4,}|Traceback|/(?:usr|work|home|tmp|root)/|site-packages|\.py\b|object at")


def is_refusal(status: int, raw: bytes) -> str:
    """Assert that an answer is one of the catalogue, in OpenAI's shape; its code."""
    error = decoded(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    entry = CATALOGUE[error["code"]]
    assert (status, error["type"]) == (entry.status, entry.type)
    pattern = "".join(
        re.escape(text) + (".{0,300}?" if slot is not None else "")
        for text, slot, _, _ in Formatter().parse(entry.text)
    )
    assert re.fullmatch(pattern, error["message"]), error["message"]
    assert not LEAKS.search(raw.decode()), raw
    return error["code"]


@asynccontextmanager
async def victims(app: Any, headers: dict[str, str] | None = None):
    """Streams run one after the other while this is open; each must say what it says alone."""
    body = {"messages": [{"role": "user", "content": "victim"}], "seed": 1, "stream": True, "max_tokens": 40}
    texts: list[str] = []

    async def one() -> str:
        answer = await call(app, "POST", "/v1/chat/completions", body, headers)
        assert answer.status == 200 and answer.content.endswith(b"data: [DONE]\n\n")
        events = [decoded(line[6:]) for line in answer.content.split(b"\n\n") if line.startswith(b"data: {")]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)

    async def loop() -> None:
        while True:
            texts.append(await one())

    alone = await one()
    task = asyncio.create_task(loop())
    try:
        yield
        while len(texts) < 2:
            await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert alone and set(texts) == {alone}


class Reply(Struct):
    """What an application answered."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return decoded(self.content)


async def call(
    app: Any,
    method: str,
    path: str | bytes,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    parts: list[bytes | asyncio.Event] | None = None,
) -> Reply:
    """One request, straight through the ASGI interface: `body` is bytes or a value for JSON.

    `parts`: the body as it comes; an event is waited for. The client stays until it is answered."""
    raw = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    fields = {"host": "localhost", "content-type": "application/json"}
    if body is not None and parts is None:
        fields["content-length"] = str(len(raw))
    fields |= headers or {}
    target = path.encode("latin-1") if isinstance(path, str) else path
    scope = {
        "type": "http",
        "method": method,
        "scheme": "http",
        "path": target.decode("latin-1"),
        "raw_path": target,
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in fields.items()],
        "server": ("127.0.0.1", 8000),
    }
    coming = [*(parts if parts is not None else [raw])]
    sent: list[Any] = []
    over = asyncio.Event()

    async def receive() -> Any:
        if coming:
            part = coming.pop(0)
            if isinstance(part, asyncio.Event):
                await part.wait()
                part = coming.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(coming)}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            over.set()

    await app(scope, receive, send)
    start, *rest = sent
    content = b"".join(message["body"] for message in rest)
    return Reply(start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, content)
