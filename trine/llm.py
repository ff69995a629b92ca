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
from typing import Any

import msgspec
from msgspec import Struct

from .core.types import Logprob, Output, Request, Sampling, Usage
from .errors import RequestError, TrineError
from .flags import make
from .loader.fetch import locate
from .text.chat import ChatTemplate
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
    """Turns the Outputs of one request into a growing Completion; stop strings end it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.completion = Completion()
        self._detokenizer, self._stops = Detokenizer(tokenizer), Stops(list(stop))

    def take(self, output: Output) -> tuple[str, bool]:
        """The text that is now certain, and whether a stop string was hit (the rest is to be aborted)."""
        done = self.completion
        done.tokens += output.tokens
        done.logprobs += output.logprobs or []
        shown = output.tokens[:-1] if output.finished == "stop" else output.tokens
        text, hit = self._stops.feed(self._detokenizer.feed(shown))
        if output.finished and not hit:
            tail, hit = self._stops.feed(self._detokenizer.close())
            text += tail if hit else tail + self._stops.close()
        done.text += text
        if hit or output.finished:
            done.finish_reason = "stop" if hit else output.finished
            done.usage, done.error = output.usage, output.error
        return text, hit is not None


class Text:
    """What both faces need of a model's text: prompts to token ids, outputs to Writers."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.config = make({"model": model} | options)
        self.path = locate(self.config.model, self.config.revision)
        self.tokenizer = Tokenizer.open(self.path)
        self.ids = itertools.count()
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        """Opened when first needed: completions work without one."""
        if self._template is None:
            self._template = ChatTemplate.of(self.tokenizer)
        return self._template

    def request(self, prompt: Prompt, sampling: Sampling) -> Request:
        """A Request of a prompt: text (special tokens of the model are added) or token ids."""
        tokens = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        return Request(id=f"r{next(self.ids)}", tokens=tokens, sampling=sampling)

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
    """A model, to be asked from Python. Calls block; one thread at a time."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        from .engine.start import start

        self._text = Text(model, options)
        self._engine, self.ready = start(self._text.config, self._text.path)

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
        requests = (self._text.request(p, s) for p in each for s in _spread(sampling, n))
        done: dict[str, Completion] = {}
        writers: dict[str, Writer] = {}
        with _bar(progress, len(each) * n) as advance:
            for id, writer, _ in self._run(requests, list(stop)):
                writers.setdefault(id, writer)
                if writer.completion.finish_reason and id not in done:
                    done[id] = writer.completion
                    advance()
        return list(
            {
                id: w.completion for id, w in sorted(writers.items(), key=lambda item: int(item[0][1:]))
            }.values()
        )

    def chat(
        self, messages: Messages | list[Messages], sampling: Sampling | None = None, **more: Any
    ) -> list[Completion]:
        """Answer one conversation, or each of several."""
        each: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self.generate([self._text.chat(m) for m in each], sampling, **more)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """The text of one completion as it comes. Leaving the loop early aborts it."""
        request = self._text.request(prompt, sampling or Sampling())
        try:
            for _, writer, text in self._run(iter([request]), list(stop)):
                if text:
                    yield text
                if writer.completion.error:
                    raise TrineError(writer.completion.error)
        finally:
            self._engine.abort(request.id)
            while self._engine.busy:
                self._engine.step()

    def stream_chat(
        self, messages: Messages, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """The text of the assistant's answer as it comes."""
        return self.stream(self._text.chat(messages), sampling, stop=stop)

    def tokenize(self, text: str) -> list[int]:
        return self._text.tokenizer.encode(text, special=True)

    def detokenize(self, tokens: list[int]) -> str:
        return self._text.tokenizer.decode(tokens)

    def close(self) -> None:
        """Give back the compute thread and the memory."""
        self._engine.executor.close()

    def _run(self, requests: Iterator[Request], stop: list[str]) -> Iterator[tuple[str, Writer, str]]:
        """Step the engine until all are done; a few are queued ahead, so thousands cost no more."""
        live: dict[str, Writer] = {}
        ahead = 2 * self.ready.max_num_seqs
        while True:
            for request in itertools.islice(requests, max(0, ahead - len(live))):
                live[request.id] = writer = Writer(self._text.tokenizer, stop)
                try:
                    self._engine.add(request)
                except RequestError as error:
                    live.pop(request.id)
                    yield request.id, writer, writer.take(_refused(request, error))[0]
            if not live:
                return
            for output in self._engine.step():
                if writer := live.get(output.id):
                    text, hit = writer.take(output)
                    if hit and not output.finished:
                        self._engine.abort(output.id)
                    if hit or output.finished:
                        live.pop(output.id)
                    yield output.id, writer, text


def _refused(request: Request, error: RequestError) -> Output:
    return Output(request.id, [], "error", error=str(error))


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

    async def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        """Complete one prompt."""
        return (await self._last(self._writers(prompt, sampling, stop))).completion

    async def chat(
        self, messages: Messages, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        """Answer one conversation."""
        tokens = await asyncio.to_thread(self._text.chat, messages)
        return await self.generate(tokens, sampling, stop=stop)

    async def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> AsyncIterator[str]:
        """The text of one completion as it comes. Closing the iterator aborts it."""
        async for _, text in self._writers(prompt, sampling, stop):
            if text:
                yield text

    async def generate_many(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, *, stop: Sequence[str] = ()
    ) -> list[Completion]:
        """Complete all prompts at once."""
        return list(await asyncio.gather(*(self.generate(p, sampling, stop=stop) for p in prompts)))

    @staticmethod
    async def _last(pairs: AsyncIterator[tuple[Writer, str]]) -> Writer:
        seen = [writer async for writer, _ in pairs]
        return seen[-1]  # every request has a last Output

    async def _writers(
        self, prompt: Prompt, sampling: Sampling | None, stop: Sequence[str]
    ) -> AsyncIterator[tuple[Writer, str]]:
        request = self._text.request(prompt, sampling or Sampling())
        writer, queue = Writer(self._text.tokenizer, stop), asyncio.Queue()
        self._engine.add(request)
        self._queues[request.id] = queue
        self._work.set()
        try:
            while writer.completion.finish_reason is None:
                text, _ = writer.take(await queue.get())
                yield writer, text
        finally:
            del self._queues[request.id]
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
