"""First light on a real model: what a server shows, measured from outside, saved as JSON.

    python tools/show.py --save benchmarks/first-light.json

Starts `trine serve` itself (loopback only), asks it as a client would, kills its engine process
under load, and stops it. Exit status 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trine.bench.datasets import words  # noqa: E402
from trine.bench.serve import commit, machine  # noqa: E402

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
TOPICS = ["rivers", "bread", "clocks", "maps", "glass", "bees", "tides", "chess", "music", "iron"]


class Served:
    """A server of our own, and a client of it."""

    def __init__(self, model: str, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trine", "serve", model, "--port", str(self.port), *flags], cwd=ROOT
        )
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=600, trust_env=False)

    async def ready(self) -> float:
        """Seconds from the start of the process to a server that says it is ready."""
        while time.monotonic() - self.started < 180:
            try:
                if (await self.http.get("/ready")).status_code == 200:
                    return time.monotonic() - self.started
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.02)
        raise SystemExit("the server did not become ready in 180 s")

    def engine(self) -> int:
        """The pid of the engine process."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if (
                    b"trine.engine.loop" in path.read_bytes()
                    and _parent(int(path.parent.name)) == self.process.pid
                ):
                    return int(path.parent.name)
            except OSError:
                continue
        raise SystemExit("no engine process found")

    async def chat(self, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 32} | more
        answer = await self.http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {answer.text[:500]}")
        return answer.json()

    async def stream(self, messages: list[dict[str, str]], **more: Any) -> tuple[str, float, str | None]:
        """Text, seconds to the first of it, and how it ended."""
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 32,
            "stream": True,
        } | more
        text, first, ended, began = "", 0.0, None, time.monotonic()
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    ended = f"{ended} done"
                elif line.startswith("data: "):
                    for choice in json.loads(line[6:]).get("choices", []):
                        if piece := choice["delta"].get("content"):
                            first = first or time.monotonic() - began
                            text += piece
                        ended = choice.get("finish_reason") or ended
        return text, first, ended

    async def metric(self, name: str) -> float:
        """The sum of a series over its labels."""
        text = (await self.http.get("/metrics")).text
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
        if not found:
            raise SystemExit(f"/metrics has no {name}")
        return sum(map(float, found))

    async def stop(self) -> float:
        """Seconds from SIGTERM to the exit."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait, 60)
        await self.http.aclose()
        return time.monotonic() - began

    model = "smollm2"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def chats(count: int) -> list[list[dict[str, str]]]:
    """Chats of different lengths, some with a system message that others share."""
    made = []
    for i in range(count):
        system = [{"role": "system", "content": "You answer in one short sentence."}] if i % 3 == 0 else []
        made.append(
            [
                *system,
                {
                    "role": "user",
                    "content": f"Say something about {TOPICS[i % 10]}"
                    + f" and {TOPICS[i % 7]}" * (i % 5)
                    + ".",
                },
            ]
        )
    return made


async def first_answer(served: Served) -> dict[str, Any]:
    ready = await served.ready()
    text, first, ended = await served.stream(QUESTION)
    return {
        "ready_seconds": round(ready, 2),
        "first_token_seconds": round(ready + first, 2),
        "answer": text,
        "ended": ended,
        "holds": "Paris" in text and ended in ("stop done", "length done"),
    }


async def same_text(served: Served) -> dict[str, Any]:
    """64 chats at once, and each alone afterwards: greedy and seeded ones."""
    asked = chats(64)
    more = [{"seed": i, "temperature": 0.8} if i % 2 else {} for i in range(64)]
    began = time.monotonic()
    together = await asyncio.gather(*(served.chat(m, **k) for m, k in zip(asked, more, strict=True)))
    seconds = time.monotonic() - began
    tokens = sum(a["usage"]["completion_tokens"] for a in together)
    alone = [await served.chat(m, **k) for m, k in zip(asked, more, strict=True)]
    same = sum(
        a["choices"][0]["message"]["content"] == b["choices"][0]["message"]["content"]
        for a, b in zip(together, alone, strict=True)
    )
    return {
        "chats": 64,
        "same_as_alone": same,
        "seconds_together": round(seconds, 2),
        "output_tokens_per_second": round(tokens / seconds, 1),
        "holds": same == 64,
    }


async def shared_prefix(served: Served) -> dict[str, Any]:
    """32 that arrive together and share some 1,024 tokens: how many prompt tokens were computed."""
    stem = words(420, random.Random(7))
    before = [
        await served.metric(name) for name in ("trine_prompt_tokens_total", "trine_prefix_cache_hits_total")
    ]
    answers = await asyncio.gather(
        *(served.chat([{"role": "user", "content": f"{stem} number {i}"}], max_tokens=4) for i in range(32))
    )
    after = [
        await served.metric(name) for name in ("trine_prompt_tokens_total", "trine_prefix_cache_hits_total")
    ]
    prompt, hits = (int(b - a) for a, b in zip(before, after, strict=True))
    each = answers[0]["usage"]["prompt_tokens"]
    return {
        "requests": 32,
        "prompt_tokens_each": each,
        "prompt_tokens": prompt,
        "computed": prompt - hits,
        "holds": prompt - hits < each + 32 * 24,
    }


async def second_turn(served: Served) -> dict[str, Any]:
    """The second turn of a chat computes only its new tokens."""
    asked = [{"role": "user", "content": f"Remember this: {words(200, random.Random(8))}"}]
    first = await served.chat(asked)
    answer = first["choices"][0]["message"]["content"]
    second = await served.chat(
        [
            *asked,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Thank you. What was it?"},
        ]
    )
    usage = second["usage"]
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    old = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    return {
        "first_turn_tokens": old,
        "prompt_tokens": usage["prompt_tokens"],
        "computed": computed,
        "holds": computed <= usage["prompt_tokens"] - old + 4,
    }


async def kill_engine(served: Served) -> dict[str, Any]:
    """kill -9 of the engine process under 32 live streams."""
    asked = chats(32)
    more = [{"seed": i, "temperature": 0.8} if i % 2 else {} for i in range(32)]
    alone = [
        (await served.chat(m, max_tokens=48, **k))["choices"][0]["message"]["content"]
        for m, k in zip(asked, more, strict=True)
    ]
    victim = served.engine()
    streams = [
        asyncio.create_task(served.stream(m, max_tokens=48, **k)) for m, k in zip(asked, more, strict=True)
    ]
    await asyncio.sleep(1.5)
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    done = await asyncio.gather(*streams)
    seconds = time.monotonic() - killed
    same = sum(text == solo for (text, _, _), solo in zip(done, alone, strict=True))
    ended = sum(bool(end and end.endswith("done")) for _, _, end in done)
    return {
        "streams": 32,
        "ended": ended,
        "same_as_alone": same,
        "seconds_after_kill_to_all_ended": round(seconds, 2),
        "holds": same == ended == 32,
    }


async def orphans(served: Served) -> dict[str, Any]:
    """kill -9 of the server process: its children are gone within 3 s."""
    child = served.engine()
    served.process.kill()
    served.process.wait()
    began = time.monotonic()
    while Path(f"/proc/{child}").exists() and time.monotonic() - began < 10:
        await asyncio.sleep(0.01)
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _is_ours(p, served.port)]
    seconds = time.monotonic() - began
    return {"seconds": round(seconds, 2), "left": len(left), "holds": seconds < 3 and not left}


def _is_ours(path: Path, port: int) -> bool:
    try:
        return str(port).encode() in path.read_bytes()
    except OSError:
        return False


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {"commit": commit(), "machine": machine()}
    served = Served("smollm2", [])
    try:
        for step in (first_answer, same_text, shared_prefix, second_turn, kill_engine):
            result[step.__name__] = await step(served)
            print(step.__name__, json.dumps(result[step.__name__]), flush=True)
        result["stop_seconds"] = round(await served.stop(), 2)
    finally:
        if served.process.poll() is None:
            served.process.kill()
    served = Served("smollm2", [])
    await served.ready()
    result["orphans"] = await orphans(served)
    print("orphans", json.dumps(result["orphans"]), "stop", result["stop_seconds"], flush=True)
    if given.save:
        given.save.parent.mkdir(parents=True, exist_ok=True)
        given.save.write_text(json.dumps(result, indent=1) + "\n")
    return (
        0
        if all(value["holds"] for value in result.values() if isinstance(value, dict) and "holds" in value)
        else 1
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
