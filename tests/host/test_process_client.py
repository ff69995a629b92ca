"""The engine in a process of its own: streams, aborts, limits, and what a clean stop leaves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.kit import engine_process
from tests.kit.engine_process import solo
from trine.config import Config
from trine.core.types import Output, Request, Sampling
from trine.engine.client import EngineClient, Limits

SCRIPT = engine_process.__file__
QUICK = Limits(tick=0.01, silent=0.8, frozen=1.5, slow=1.0, stalled=1.5, start=30, back_off=0.01, stop=3)


@asynccontextmanager
async def engine(*flags: str, limits: Limits = QUICK, **config) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        Config(**config), Path("/nowhere"), command=(sys.executable, SCRIPT, *flags), limits=limits
    )
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


def test_a_request_gives_what_it_gives_alone() -> None:
    async def body() -> None:
        async with engine() as client:
            outputs = await read(client, request := ask("a"))
            assert tokens(outputs) == solo(request)
            assert [o.finished for o in outputs][-1] == "length" and all(o.id == "a" for o in outputs)
            assert outputs[-1].usage and (outputs[-1].usage.prompt, outputs[-1].usage.output) == (3, 20)
            assert client.health.ok and client.live == 0

    asyncio.run(body())
