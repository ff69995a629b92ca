"""LLM and AsyncLLM: the engine in your own process.

    from trine import LLM, Sampling
    llm = LLM("smollm2")
    print(llm.generate("The capital of France is", Sampling(temperature=0, max_tokens=8))[0].text)

Both do what the server's face does (text to tokens, tokens to text) around the same `Engine`;
neither knows of HTTP. Options are the fields of Config: LLM("smollm2", max_num_seqs=8).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any

import msgspec
from msgspec import Struct

from .core.types import Logprob, Output, Request, Sampling, Usage
from .errors import RequestError, TrineError
from .flags import make
from .loader.fetch import locate
from .text.chat import ChatTemplate, open_template
from .text.detokenizer import Detokenizer
from .text.stops import Stops
from .text.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
Prompt = str | list[int]


class Completion(Struct, kw_only=True):
    """What one prompt gave. `finish_reason`: "stop", "length", "abort" or "error"."""

    text: str = ""
    tokens: list[int] = []
    finish_reason: str | None = None
    logprobs: list[Logprob] = []
    usage: Usage | None = None
    error: str | None = None


class Writer:
    """Turns the Outputs of one request into a growing Completion; stop strings end it.

    Without a tokenizer there are token ids and no text."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], *, continues: bool) -> None:
        self.completion = Completion()
        self._detokenizer = Detokenizer(tokenizer, continues=continues) if tokenizer else None
        if stop and not tokenizer:
            raise TrineError("stop strings need a tokenizer, and this model has none")
        self._stops = Stops([stop] if isinstance(stop, str) else list(stop))

    def take(self, output: Output) -> tuple[str, bool]:
        """The text that is now certain, and whether a stop string was hit (the rest is to be aborted)."""
        done = self.completion
        if done.finish_reason:  # a stop string ended it: only the counts are still wanted
            done.usage = output.usage
            return "", False
        done.tokens += output.tokens
        done.logprobs += output.logprobs or []
        text, hit = self._text(output) if self._detokenizer else ("", None)
        done.text += text
        if hit or output.finished:
            done.finish_reason = "stop" if hit else output.finished
            done.usage, done.error = output.usage, output.error
        return text, hit is not None

    def _text(self, output: Output) -> tuple[str, str | None]:
        """What is certain now, and the stop string that was hit."""
        assert self._detokenizer is not None
        shown = output.tokens[:-1] if output.finished == "stop" else output.tokens
        text, hit = self._stops.feed(self._detokenizer.feed(shown))
        if output.finished and not hit:
            tail, hit = self._stops.feed(self._detokenizer.close())
            text += tail if hit else tail + self._stops.close()
        return text, hit


class Text:
    """What both faces need of a model's text: prompts to token ids, outputs to Writers."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.config = make({"model": model} | options)
        self.path = locate(self.config.model, self.config.revision)
        self.without: TrineError | None = None  # why there is no tokenizer
        self.maybe = self._open()
        self.ids = itertools.count()
        self._template: ChatTemplate | None = None

    def _open(self) -> Tokenizer | None:
        """Random weights have nothing to say: token ids will do, so a tokenizer need not be there."""
        try:
            return Tokenizer.open(self.path, open_template(self.config.chat_template))
        except TrineError as error:
            if self.config.load_format != "dummy":
                raise
            self.without = error
            return None

    @property
    def tokenizer(self) -> Tokenizer:
        if self.maybe is None:
            raise TrineError(f"{self.without}: without a tokenizer, give token ids, and read token ids")
        return self.maybe

    @property
    def template(self) -> ChatTemplate:
        """Opened when first needed: completions work without one."""
        if self._template is None:
            self._template = ChatTemplate.of(self.tokenizer)
        return self._template

    def encode(self, text: str) -> list[int]:
        """Token ids of a text of the program's own: control tokens spelled in it are control tokens."""
        return self.tokenizer.encode(text, special=True, bos=True)

    def request(self, prompt: Prompt, sampling: Sampling) -> Request:
        """A Request of a prompt: a text, or token ids."""
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Request(id=f"r{next(self.ids)}", tokens=tokens, sampling=sampling)

    def close(self) -> None:
        if self._template is not None:
            self._template.close()

    def chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        return self.tokenizer.encode_segments(self.template.render(messages))


def _spread(sampling: Sampling | None, n: int) -> list[Sampling]:
    """One Sampling for each of n samples: seeds follow each other if one was given."""
    sampling = sampling or Sampling()
    if sampling.seed is None:
        return [sampling] * n
    return [msgspec.structs.replace(sampling, seed=sampling.seed + i) for i in range(n)]


class LLM:
    """A model, to be asked from Python. Calls block, and one goes at a time."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        from .engine.start import start

        self._text = Text(model, options)
        self._engine, self.ready = start(self._text.config, self._text.path)
        self._turn = Lock()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        n: int = 1,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete each prompt; the answers are in the prompts' order, n for each."""
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        each: list[Any] = [prompts] if single else list(prompts)
        return self._all(each, sampling, stop, n, progress, continues=True)

    def chat(
        self,
        messages: Messages | list[Messages],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        n: int = 1,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer one conversation, or each of several; n answers for each."""
        each: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self._all([self._text.chat(m) for m in each], sampling, stop, n, progress, continues=False)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """The text of one completion as it comes. Leaving the loop early aborts it."""
        return self._stream(prompt, sampling, stop, continues=True)

    def stream_chat(
        self, messages: Messages, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """The text of the assistant's answer as it comes."""
        return self._stream(self._text.chat(messages), sampling, stop, continues=False)

    def tokenize(self, text: str) -> list[int]:
        return self._text.encode(text)

    def detokenize(self, tokens: list[int]) -> str:
        return self._text.tokenizer.decode(tokens)

    def close(self) -> None:
        """Give back the compute thread, the memory and the child that renders templates."""
        if not self._closed:
            self._closed = True
            self._engine.executor.close()
            self._text.close()

    def _all(
        self,
        prompts: list[Any],
        sampling: Sampling | None,
        stop: Sequence[str],
        n: int,
        progress: bool,
        *,
        continues: bool,
    ) -> list[Completion]:
        requests = (self._text.request(prompt, s) for prompt in prompts for s in _spread(sampling, n))
        writers: dict[str, Writer] = {}
        with _bar(progress, len(prompts) * n) as advance:
            for id, writer, _ in self._run(requests, stop, continues):
                if id not in writers:
                    writers[id] = writer
                if writer.completion.usage or writer.completion.error:
                    advance()
        return [writers[id].completion for id in sorted(writers, key=lambda id: int(id[1:]))]

    def _stream(
        self, prompt: Prompt, sampling: Sampling | None, stop: Sequence[str], *, continues: bool
    ) -> Iterator[str]:
        request = self._text.request(prompt, sampling or Sampling())
        for _, writer, text in self._run(iter([request]), stop, continues):
            if text:
                yield text
            if writer.completion.error:
                raise TrineError(writer.completion.error)

    def _run(
        self, requests: Iterator[Request], stop: Sequence[str], continues: bool
    ) -> Iterator[tuple[str, Writer, str]]:
        """Step the engine until all are done; a few are queued ahead, so thousands cost no more.
        Left early, what still runs is aborted."""
        if self._closed:
            raise TrineError("this LLM was closed")
        if not self._turn.acquire(blocking=False):
            raise TrineError(
                "this LLM is answering: finish or close the stream before, or use AsyncLLM for many callers"
            )
        live: dict[str, Writer] = {}
        try:
            while self._feed(requests, live, stop, continues):
                for output in self._engine.step():
                    if writer := live.get(output.id):
                        text, hit = writer.take(output)
                        if output.finished:
                            del live[output.id]
                        elif hit:
                            self._engine.abort(output.id)
                        yield output.id, writer, text
        finally:
            for id in live:
                self._engine.abort(id)
            while self._engine.busy:
                self._engine.step()
            self._turn.release()

    def _feed(
        self, requests: Iterator[Request], live: dict[str, Writer], stop: Sequence[str], continues: bool
    ) -> bool:
        """Queue requests up to some more than can run; whether any is alive."""
        for request in itertools.islice(requests, max(0, 2 * self.ready.max_num_seqs - len(live))):
            live[request.id] = Writer(self._text.maybe, stop, continues=continues)
            try:
                self._engine.add(request)
            except RequestError as error:
                self._engine.outputs.append(Output(request.id, [], "error", error=str(error)))
        return bool(live)


def _bar(show: bool, total: int) -> Any:
    """A context that gives `advance()`; a progress bar on stderr if `show`."""
    from contextlib import contextmanager

    @contextmanager
    def bar() -> Iterator[Any]:
        if not show:
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("generating", total=total)
            yield lambda: progress.advance(task)

    return bar()


class AsyncLLM:
    """The same for asyncio: many callers share the engine's steps. Start it with `async with`."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self._text = Text(model, options)
        self._queues: dict[str, asyncio.Queue[Output]] = {}

    async def __aenter__(self) -> AsyncLLM:
        from .engine.start import start

        loop = asyncio.get_running_loop()
        self._engine, self.ready = await asyncio.to_thread(start, self._text.config, self._text.path)
        self._work = asyncio.Event()
        self._engine.executor.on_done(lambda: loop.call_soon_threadsafe(self._work.set))
        self._task = asyncio.create_task(self._step_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._engine.executor.close)
        await asyncio.to_thread(self._text.close)

    async def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        """Complete one prompt."""
        return await self._last(self._writers(prompt, sampling, stop, continues=True))

    async def chat(
        self, messages: Messages, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        """Answer one conversation."""
        tokens = await asyncio.to_thread(self._text.chat, messages)
        return await self._last(self._writers(tokens, sampling, stop, continues=False))

    async def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> AsyncIterator[str]:
        """The text of one completion as it comes. Closing the iterator aborts it."""
        async for _, text in self._writers(prompt, sampling, stop, continues=True):
            if text:
                yield text

    async def generate_many(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> list[Completion]:
        """Complete all prompts at once."""
        return list(await asyncio.gather(*(self.generate(p, sampling, stop=stop) for p in prompts)))

    @staticmethod
    async def _last(pairs: AsyncIterator[tuple[Writer, str]]) -> Completion:
        seen = [writer async for writer, _ in pairs]
        return seen[-1].completion  # every request has a last Output

    async def _writers(
        self, prompt: Prompt, sampling: Sampling | None, stop: Sequence[str], *, continues: bool
    ) -> AsyncIterator[tuple[Writer, str]]:
        if self._task.done():
            raise TrineError("this AsyncLLM has ended")
        request = self._text.request(prompt, sampling or Sampling())
        writer = Writer(self._text.maybe, stop, continues=continues)
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._engine.add(request)
        self._queues[request.id] = queue
        self._work.set()
        ended = False
        try:
            while not ended:
                output = await queue.get()
                text, hit = writer.take(output)
                ended = output.finished is not None
                if hit and not ended:
                    self._engine.abort(request.id)
                    self._work.set()
                yield writer, text
        finally:
            del self._queues[request.id]
            if not ended:
                self._engine.abort(request.id)
                self._work.set()
        if writer.completion.error:
            raise TrineError(writer.completion.error)

    async def _step_on(self) -> None:
        """Launch, wait for the compute thread without holding up the event loop, hand out."""
        while True:
            try:
                while self._engine.launch():
                    pass
                if self._engine.busy and self._engine.ready():
                    self._hand_out(self._engine.collect())
                    await asyncio.sleep(0)
                    continue
            except Exception as error:
                for id, queue in self._queues.items():
                    queue.put_nowait(Output(id, [], "error", error=f"the engine failed: {error}"))
                raise
            self._work.clear()
            if not (self._engine.busy and self._engine.ready()):
                await self._work.wait()

    def _hand_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            if queue := self._queues.get(output.id):
                queue.put_nowait(output)
