"""Rules S6 and S7 on real processes: killed, crashed, frozen, stuck; no stream is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
from pathlib import Path

import pytest
import uvloop

from tests.kit.engine_process import Trouble, solo
from tests.kit.process import QUICK, ask, engine, process_of, read, rest, tokens, until
from trine.core.types import Output, Request
from trine.engine.client import EngineClient
from trine.errors import EngineDead


def check(request: Request, outputs: list[Output]) -> None:
    """Every token once, in order, one end, true counts."""
    assert tokens(outputs) == solo(request), request.id
    assert [o.finished for o in outputs if o.finished] == ["length"]
    usage = outputs[-1].usage
    assert usage and (usage.prompt, usage.output) == (len(request.tokens), request.sampling.max_tokens)
    assert usage.cached == 1 and not any(o.usage for o in outputs[:-1])


async def back(client: EngineClient, restarts: int) -> None:
    await until(lambda: client.health.restarts >= restarts and client.health.ok)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_kill_under_32_streams_loses_none(loop) -> None:
    trial = int(loop is uvloop.new_event_loop)
    chance = random.Random(trial)

    async def body() -> None:
        async with engine() as client:
            requests = [
                ask(f"r{i}", prompt=[i, trial], length=chance.randint(40, 160), seed=i) for i in range(32)
            ]
            readers = [asyncio.create_task(read(client, request)) for request in requests]
            for kill in range(1, 4):
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                os.kill(process_of(client), signal.SIGKILL)
                await back(client, kill)
            for request, outputs in zip(requests, await asyncio.gather(*readers), strict=True):
                check(request, outputs)
            assert client.health.restarts == 3 and client.counts.poisoned == 0

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(body())


def test_the_seed_is_drawn_before_the_engine_hears_of_it() -> None:
    async def body() -> None:
        async with engine() as client:
            stream = client.submit(ask("a", length=120, seed=None))
            request = client._replay.records[stream.name].request
            await anext(stream)
            os.kill(process_of(client), signal.SIGKILL)
            last = tokens(await rest(stream))
            assert request.sampling.seed is not None
            assert solo(request)[-len(last) :] == last and len(last) > 100
            other = client.submit(ask("b", seed=None))
            assert client._replay.records[other.name].request.sampling.seed != request.sampling.seed
            other.close()

    asyncio.run(body())


def test_counters_never_go_backwards() -> None:
    async def body() -> None:
        async with engine() as client:
            seen: list[int] = []
            client._line.feed = lambda stats: seen.append(stats.output_tokens)  # type: ignore[method-assign]
            for life in range(3):
                check(request := ask(f"r{life}", length=80), await read(client, request))
                await until(lambda so_far=80 * (life + 1): client.stats.output_tokens == so_far)
                os.kill(process_of(client), signal.SIGKILL)
                await back(client, life + 1)
            assert seen == sorted(seen) and seen[-1] == 240

    asyncio.run(body())


@pytest.mark.parametrize("trouble", [Trouble.RAISE, Trouble.SIGNAL])
def test_a_poisoned_request_fails_alone(trouble: int) -> None:
    async def body() -> None:
        async with engine() as client:
            requests = [ask(f"r{i}", prompt=[i], length=300) for i in range(8)]
            readers = [asyncio.create_task(read(client, request)) for request in requests]
            outputs = await read(client, ask("poison", prompt=[7, trouble], length=300))
            assert [o.finished for o in outputs if o.finished] == ["error"]
            assert "other requests are not affected" in (outputs[-1].error or "")
            assert tokens(outputs) == solo(ask("poison", prompt=[7, trouble]))[: Trouble.at]
            late = ask("late", prompt=[9])
            check(late, await read(client, late))
            for request, answer in zip(requests, await asyncio.gather(*readers), strict=True):
                check(request, answer)
            assert client.counts.poisoned == 1 and client.health.ok

    asyncio.run(body())


def test_a_frozen_engine_is_not_healthy_and_may_come_back() -> None:
    async def body() -> None:
        async with engine() as client:
            reader = asyncio.create_task(read(client, request := ask("a", length=3_000)))
            await until(lambda: client.health.step > 3)
            os.kill(process_of(client), signal.SIGSTOP)
            await until(lambda: not client.health.ok)
            assert "no heartbeat" in client.health.reason
            os.kill(process_of(client), signal.SIGCONT)
            await until(lambda: client.health.ok)
            check(request, await reader)
            assert client.health.restarts == 0

    asyncio.run(body())


def test_an_engine_that_stays_frozen_is_replaced() -> None:
    async def body() -> None:
        async with engine(limits=dataclasses.replace(QUICK, frozen=1.2)) as client:
            reader = asyncio.create_task(read(client, request := ask("a", length=3_000)))
            await until(lambda: client.health.step > 3)
            frozen = process_of(client)
            os.kill(frozen, signal.SIGSTOP)
            check(request, await reader)
            assert client.health.restarts >= 1 and not Path(f"/proc/{frozen}").exists()

    asyncio.run(body())


def test_a_step_that_never_ends_is_seen_although_the_heart_beats() -> None:
    async def body() -> None:
        async with engine(limits=dataclasses.replace(QUICK, slow=0.6, stalled=1.2)) as client:
            stream = client.submit(ask("stuck", prompt=[Trouble.STALL], length=50))
            await until(lambda: not client.health.ok)
            assert "no step" in client.health.reason
            await until(lambda: client.health.restarts == 1)
            stream.close()
            await back(client, 1)
            check(request := ask("a"), await read(client, request))

    asyncio.run(body())


def test_a_busy_face_does_not_take_the_engine_for_dead() -> None:
    async def body() -> None:
        async with engine(limits=dataclasses.replace(QUICK, silent=0.8, frozen=1.2)) as client:
            await asyncio.sleep(0)
            os.sched_yield()
            _hold_the_loop(1.3)
            assert client.health.ok
            await asyncio.sleep(0.02)
            assert client.health.ok and client.health.restarts == 0

    asyncio.run(body())


def _hold_the_loop(seconds: float) -> None:
    """As a face does that computes instead of listening."""
    import time

    time.sleep(seconds)


def test_an_abort_while_there_is_no_engine() -> None:
    async def body() -> None:
        async with engine() as client:
            streams = [client.submit(ask(f"r{i}", length=200)) for i in range(3)]
            await asyncio.gather(*map(anext, streams))
            os.kill(process_of(client), signal.SIGKILL)
            client.abort("r0")  # perhaps sent to nobody
            await until(lambda: client.health.reason == "restarting")
            client.abort("r1")
            fresh = client.submit(ask("new"))
            answers = await asyncio.gather(*map(rest, streams))
            assert [a[-1].finished for a in answers] == ["abort", "abort", "length"]
            check(ask("new"), await rest(fresh))

    asyncio.run(body())


def test_a_start_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    async def body() -> None:
        broken = tmp_path / "broken"
        limits = dataclasses.replace(QUICK, failed_starts=1000)
        async with engine("--broken", str(broken), limits=limits) as client:
            stream = client.submit(request := ask("a", length=3_000))  # more than is made before the kill
            first = await anext(stream)
            broken.touch()
            os.kill(process_of(client), signal.SIGKILL)
            await until(lambda: client.health.reason == "restarting")
            life = client._life
            await until(lambda: client._life and client._life is not life and client._life.death.done())
            assert not client.health.ok
            broken.unlink()
            check(request, [first, *await rest(stream)])
            assert client.health.ok and client.health.restarts == 1

    asyncio.run(body())


def test_an_engine_that_cannot_start_again_is_given_up(tmp_path: Path) -> None:
    async def body() -> None:
        broken = tmp_path / "broken"
        async with engine("--broken", str(broken)) as client:
            stream = client.submit(ask("a", length=10_000))
            await anext(stream)
            broken.touch()
            os.kill(process_of(client), signal.SIGKILL)
            with pytest.raises(EngineDead, match="no start with"):
                await rest(stream)
            assert isinstance(await client.ended(), EngineDead)
            assert (client.health.ok, client.health.reason, client.live) == (False, "dead", 0)
            with pytest.raises(EngineDead):
                client.submit(ask("b"))
            with pytest.raises(EngineDead):
                await client.command("flush")

    asyncio.run(body())
