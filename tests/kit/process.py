"""An EngineClient over the stand-in engine process, and words for asking it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from trine.config import Config
from trine.core.stats import StepStats
from trine.core.types import Output, Request, Sampling
from trine.engine.client import EngineClient, Limits

from . import engine_process

SCRIPT = engine_process.__file__
QUICK = Limits(tick=0.01, silent=1.5, frozen=20, slow=20, stalled=20, start=30, back_off=0.01, stop=3)


def made(*flags: str, limits: Limits = QUICK, listener=None, **config) -> EngineClient:
    command = (sys.executable, SCRIPT, *flags)
    return EngineClient(Config(**config), Path("/nowhere"), command=command, limits=limits, listener=listener)


@asynccontextmanager
async def engine(*flags: str, **options) -> AsyncIterator[EngineClient]:
    client = made(*flags, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def ask(id: str, *, length: int = 20, prompt: list[int] | None = None, seed: int | None = 1) -> Request:
    return Request(id, prompt or [1, 2, 3], Sampling(max_tokens=length, seed=seed))


async def read(client: EngineClient, request: Request) -> list[Output]:
    return [output async for output in client.submit(request)]


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


async def empty(client: EngineClient) -> StepStats:
    """The engine's own numbers, once it has nothing left."""
    while (stats := msgspec.convert(await client.command("stats"), StepStats)).running:
        await asyncio.sleep(0.005)
    return stats


async def rest(stream: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in stream]


def process_of(client: EngineClient) -> int:
    assert client._life and client._life.process
    return client._life.process.pid


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
