"""The one async door of inference: an `Ask` in, `Delta`s out.

Templates render and texts become tokens beside the event loop; the prompt's length is checked
with the numbers in the answer; a full queue is refused with an honest time. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec

from trine.core.messages import Ready
from trine.core.types import Request
from trine.text.detokenizer import Detokenizer
from trine.text.stops import Stops
from trine.text.tokenizer import Tokenizer

from .ask import Ask, Delta, Facts
from .catalogue import Refusal
from .choice import Choice
from .job import Engine, Job
from .timing import Meter

Value = TypeVar("Value")
ENCODERS = 4  # threads that turn text into tokens
LONG = 65536  # size of a text whose tokens take long
SHORTEST_WAIT, LONGEST_WAIT, UNKNOWN_WAIT = 1.0, 600.0, 5.0  # seconds of Retry-After


class Template(Protocol):
    """What the service needs of trine.text.chat."""

    async def arender(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> list[tuple[str, bool]]: ...


class Service:
    """Give it an engine, a tokenizer and a chat template (None: the model has none). `ranked`: whether the
    engine's policy goes by priority."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: Template | None,
        *,
        model: str,
        max_queue: int = 1024,
        request_timeout: float = 3600.0,
        ranked: bool = False,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.tokenizer, self.template, self.model = engine, tokenizer, template, model
        self.max_queue, self.request_timeout, self.clock = max_queue, request_timeout, clock
        self.meter, self.ranked = meter, ranked
        self.draining = False
        self.jobs: dict[str, Job] = {}  # by id, while they run
        self.live = 0  # sequences asked for and not ended
        self.idle = asyncio.Event()
        self.idle.set()
        self.ends: deque[float] = deque(maxlen=64)  # when the last sequences ended
        self.threads = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self.long = asyncio.Semaphore(1)  # of texts that are long

    @cached_property
    def longest(self) -> int:
        """Bytes of text that one token can stand for, at most. It takes a look at every token: see `warm`."""
        sizes = (len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab))
        return max(sizes, default=1) or 1

    def warm(self) -> None:
        """What the first request would otherwise wait for; not for an event loop."""
        self.tokenizer.encode("warm", bos=True)
        assert self.longest

    def facts(self) -> Facts:
        """What admission checks against; a Refusal while the engine is not ready or the server ends."""
        if self.draining:
            raise Refusal("shutting_down", seconds=1)
        ready: Ready | None = self.engine.ready
        if ready is None:
            raise Refusal("not_ready", seconds=1, reason="it is starting")
        most = ready.max_num_seqs + self.max_queue
        return Facts(self.model, ready.vocab, ready.max_model_len, most, self.ranked)

    async def generate(self, ask: Ask, id: str | None = None) -> AsyncGenerator[Delta, None]:
        """Every Delta of an Ask. Refusals of the whole request come before the first one.

        Close it (`contextlib.aclosing`) to abort what runs."""
        facts = self.facts()
        wanted = max(1, len(ask.prompts)) * ask.n
        self._make_room(wanted, facts)
        id = id or new_id()
        self.live += wanted
        self.idle.clear()
        try:
            prompts = await self.encode(ask, facts)
            job = self.jobs[id] = self._job(id, ask, prompts, facts)
            async with contextlib.aclosing(job.deltas(self.request_timeout)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            if self.jobs.pop(id, None):
                self.ends.extend([self.clock()] * wanted)
            self.live -= wanted
            if not self.live:
                self.idle.set()

    def stop(self, id: str, error: BaseException) -> bool:
        """End one request with an error; False when none of that id is at work."""
        job = self.jobs.get(id)
        return job is not None and job.stop(error)

    def stop_all(self, error: BaseException) -> int:
        """End every request with an error; how many there were."""
        return sum(job.stop(error) for job in self.jobs.values())

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, ask: Ask, facts: Facts) -> list[list[int]]:
        """The prompts of an Ask as tokens."""
        if ask.messages is None:
            texts = [prompt for prompt in ask.prompts if isinstance(prompt, str)]
            self._measure(ask, facts, max((len(text.encode()) for text in texts), default=0))
            found: list[list[int]] = []
            for text in texts:
                found.append(await self._tokens(len(text), self._encode, text))
                if len(found[-1]) >= facts.max_model_len:  # the others need not be looked at
                    raise _too_long(ask, facts, len(found[-1]), "")
            ids = iter(found)
            return [next(ids) if isinstance(prompt, str) else prompt for prompt in ask.prompts]
        segments = await self.render(ask)
        size = sum(len(text.encode()) for text, _ in segments)
        self._measure(ask, facts, size)
        return [await self._tokens(size, self.tokenizer.encode_segments, segments)]

    async def render(self, ask: Ask) -> list[tuple[str, bool]]:
        """The messages of an Ask as text, with what the client wrote marked as such."""
        if self.template is None:
            raise Refusal("no_chat_template", ask.field)
        return await self.template.arender(
            ask.messages or [], tools=None, add_generation_prompt=True, kwargs=ask.arguments
        )

    async def aside(self, work: Callable[..., Value], *values: Any) -> Value:
        """Run something slow in a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *values)

    async def _tokens(self, size: int, work: Callable[..., list[int]], values: Any) -> list[int]:
        """Long texts one at a time, so that there is always a thread for short ones."""
        if size <= LONG:
            return await self.aside(work, values)
        async with self.long:
            return await self.aside(work, values)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, bos=True)

    def _measure(self, ask: Ask, facts: Facts, size: int) -> None:
        """Refuse a text that cannot fit before it is made into tokens: `size` is in bytes."""
        least = math.ceil(size / self.longest)
        if least >= facts.max_model_len:
            raise _too_long(ask, facts, least, "at least ")

    def _make_room(self, wanted: int, facts: Facts) -> None:
        if wanted > facts.most:
            raise Refusal("too_many_choices", "n", asked=wanted, limit=facts.most)
        if (missing := self.live + wanted - facts.most) > 0:
            raise Refusal("rate_limit_exceeded", seconds=math.ceil(self.wait(missing)))

    def wait(self, missing: int) -> float:
        """Seconds until `missing` sequences will have ended, at the pace of the last ones."""
        if len(self.ends) < 2:
            return UNKNOWN_WAIT
        pace = (len(self.ends) - 1) / max(self.clock() - self.ends[0], 1e-3)
        return min(max(missing / pace, SHORTEST_WAIT), LONGEST_WAIT)

    def _job(self, id: str, ask: Ask, prompts: list[list[int]], facts: Facts) -> Job:
        requests, choices = [], []
        for prompt in prompts:
            limit = _limit(ask, facts, len(prompt))
            for sample in range(ask.n):
                index, seed = len(requests), ask.sampling.seed
                sampling = msgspec.structs.replace(
                    ask.sampling,
                    max_tokens=limit,
                    min_tokens=min(ask.sampling.min_tokens, limit),
                    seed=None if seed is None else (seed + sample) % 2**63,
                )
                requests.append(
                    Request(
                        f"{id}-{index}",
                        prompt,
                        sampling,
                        space=ask.space,
                        priority=ask.priority,
                        arrived=self.clock(),
                    )
                )
                choices.append(self._choice(index, ask))
        return Job(self.engine, requests, choices, ask.n, self.meter)

    def _choice(self, index: int, ask: Ask) -> Choice:
        return Choice(
            index,
            Detokenizer(self.tokenizer, continues=ask.messages is None),
            Stops(list(ask.stops)) if ask.stops else None,
            min_tokens=ask.sampling.min_tokens,
            logprobs=ask.sampling.logprobs is not None,
        )


def new_id() -> str:
    """A request's own name in the engine: never the client's, and not to be guessed."""
    return secrets.token_hex(16)


def _limit(ask: Ask, facts: Facts, prompt: int) -> int:
    """How many tokens may be made; a Refusal with the numbers if what was asked for does not fit."""
    if prompt == 0:
        raise Refusal("empty_prompt", ask.field)
    room = facts.max_model_len - prompt
    if room < 1:
        raise _too_long(ask, facts, prompt, "")
    if ask.max_tokens is None:
        return min(room, ask.default_tokens or room)
    if ask.max_tokens > room:
        over, asked = ask.max_tokens - room, prompt + ask.max_tokens
        raise Refusal(
            "context_length_asked",
            ask.limit_field,
            limit=facts.max_model_len,
            asked=asked,
            prompt=prompt,
            output=ask.max_tokens,
            over=over,
        )
    return ask.max_tokens


def _too_long(ask: Ask, facts: Facts, prompt: int, more: str) -> Refusal:
    over = prompt + 1 - facts.max_model_len
    return Refusal(
        "context_length_exceeded", ask.field, limit=facts.max_model_len, prompt=prompt, more=more, over=over
    )
