"""One streamed chat against any OpenAI-compatible server, with the time of each token."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
from msgspec import Struct

from trine.errors import TrineError


class Timing(Struct):
    """What one request saw. Seconds are from when it was due, not from when a socket was free."""

    due: float  # seconds after the start of the run
    first: float | None = None  # to the first token
    end: float = 0.0
    gaps: list[float] = []  # between chunks with text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None


class Client:
    """Chats with `url` as `model`, streaming, with usage."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None,
        *,
        ignore_eos: bool,
        timeout: float,
        transport: Any = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model, self.ignore_eos = model, ignore_eos
        self.http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=timeout,
            transport=transport,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    async def first_model(self) -> str:
        """The first model the server lists."""
        try:
            answer = await self.http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TrineError(
                f"no server answers at {self.http.base_url}: {error}; is it ready? give its address with --url"
            ) from None
        if answer.status_code != 200:
            raise TrineError(
                f"{self.http.base_url} answers {answer.status_code} to /v1/models: {answer.text[:200]}"
            )
        return answer.json()["data"][0]["id"]

    async def server(self) -> dict[str, Any]:
        """What the server says of itself, or nothing."""
        answer = await self.http.get("/version")
        return answer.json() if answer.status_code == 200 else {}

    async def chat(self, messages: list[dict[str, str]], output: int, due: float, started: float) -> Timing:
        """Run one chat to its end. Errors are kept in the Timing, not raised."""
        timing, last = Timing(due=due), None
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    timing.error = (
                        f"{answer.status_code}: {(await answer.aread())[:200].decode(errors='replace')}"
                    )
                    return timing
                async for line in answer.aiter_lines():
                    last = _line(timing, line, last, time.monotonic() - started - due)
        except httpx.HTTPError as error:
            timing.error = type(error).__name__
        timing.end = time.monotonic() - started - due
        return timing

    async def close(self) -> None:
        await self.http.aclose()


def _line(timing: Timing, line: str, last: float | None, now: float) -> float | None:
    """Take one line of the event stream; returns when the last text came."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return last
    event = json.loads(line[6:])
    if error := event.get("error"):
        timing.error = str(error.get("message", error))[:200]
    if usage := event.get("usage"):
        timing.prompt_tokens = usage.get("prompt_tokens", 0)
        timing.output_tokens = usage.get("completion_tokens", 0)
        timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices", []))
    if not text:
        return last
    timing.text += text
    if timing.first is None:
        timing.first = now
    elif last is not None:
        timing.gaps.append(now - last)
    return now
