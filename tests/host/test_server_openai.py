"""The official client, unmodified, against the application in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from tests.kit.server import face


def client(app: Any, **options: Any) -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(app=app)
    http = httpx2.AsyncClient(transport=transport, base_url="http://localhost/v1")
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0, **options
    )


def test_a_chat_answers() -> None:
    async def body() -> None:
        app, _, engine = face()
        done = await client(app).chat.completions.create(
            model="test", messages=[{"role": "user", "content": "hello"}], max_tokens=40, seed=1
        )
        assert done.choices[0].message.content
        assert done.usage and done.usage.completion_tokens <= 40
        assert not engine.live

    asyncio.run(body())
