"""The real core in a process of its own, over the fake device: killed and poisoned, it loses nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal

from tests.kit.engine_process import CORE_POISON
from tests.kit.fake import VOCAB, Model
from tests.kit.oracle import oracle
from tests.kit.process import engine, process_of, read, tokens, until
from trine.core.types import Request, Sampling

MODEL, LONGEST = Model((0,)), 512


def solo(request: Request) -> list[int]:
    return oracle(MODEL, request.tokens, request.sampling, LONGEST)[0]


def mixed(count: int, seed: int) -> list[Request]:
    """Some share a stem; lengths around a page's border."""
    chance = random.Random(seed)
    stem = [chance.randrange(VOCAB) for _ in range(37)]
    return [
        Request(
            f"r{i}",
            (stem if i % 2 else []) + [chance.randrange(VOCAB) for _ in range(chance.choice((7, 8, 9, 40)))],
            Sampling(max_tokens=chance.randint(20, 90), seed=i),
        )
        for i in range(count)
    ]


def test_32_streams_and_three_kills() -> None:
    async def body() -> None:
        async with engine("--core", "--step", "0.001") as client:
            requests = mixed(32, 1)
            readers = [asyncio.create_task(read(client, request)) for request in requests]
            chance = random.Random(2)
            for kill in range(1, 4):
                await asyncio.sleep(chance.uniform(0.02, 0.1))
                os.kill(process_of(client), signal.SIGKILL)
                await until(lambda kill=kill: client.health.restarts == kill and client.health.ok)
            for request, outputs in zip(requests, await asyncio.gather(*readers), strict=True):
                assert tokens(outputs) == solo(request), request.id
                usage = outputs[-1].usage
                assert usage and (usage.prompt, usage.output) == (len(request.tokens), len(solo(request)))
                assert usage.cached < len(request.tokens)
            await until(lambda: not client.stats.running)
            assert client.stats.held == 0 and client.counts.poisoned == 0

    asyncio.run(body())


def test_a_poisoned_request_among_16() -> None:
    async def body() -> None:
        async with engine("--core", "--step", "0.001") as client:
            requests = mixed(15, 3)
            readers = [asyncio.create_task(read(client, request)) for request in requests]
            poison = Request("poison", [1, 2, CORE_POISON], Sampling(max_tokens=50, seed=1))
            outputs = await read(client, poison)
            assert outputs[-1].finished == "error" and client.counts.poisoned == 1
            for request, answer in zip(requests, await asyncio.gather(*readers), strict=True):
                assert tokens(answer) == solo(request), request.id

    asyncio.run(body())


def test_leaving_in_the_middle_frees_every_page() -> None:
    async def body() -> None:
        async with engine("--core") as client:
            streams = [client.submit(request) for request in mixed(24, 4)]
            await asyncio.gather(*map(anext, streams[:8]))
            for stream in streams:
                stream.close()
            stats = await client.command("stats")
            assert not stats.get("held") and not stats.get("running") and not stats.get("waiting")
            request = mixed(1, 5)[0]
            assert tokens(await read(client, request)) == solo(request)

    asyncio.run(body())
