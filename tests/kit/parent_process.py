"""A parent of an engine process, to be killed by a test: prints what it has reached."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from tests.kit.process import ask, made, process_of, until
from trine.engine.client import EngineClient


def say(*words: object) -> None:
    print(*words, flush=True)


async def main(phase: str) -> None:
    client: EngineClient = made(*(["--phase", "hold"] if phase == "hold" else []))
    starting = asyncio.create_task(client.start())
    await until(lambda: client._life and client._life.process)
    say(process_of(client), client.folder.path)
    if phase in ("spawned", "hold"):
        if phase == "hold":
            await until(lambda: client._life and "phase: hold" in client._life._lines)
        say("reached")
        with suppress(asyncio.CancelledError):
            await starting
    await starting
    streams = [client.submit(ask(str(i), length=10**6)) for i in range(8 if phase == "busy" else 0)]
    await asyncio.gather(*map(anext, streams))
    say("reached")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
