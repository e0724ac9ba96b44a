"""A server with a part of OpenAI's API, which generates one word per token and as many as requested."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

TEMPLATE_TOKENS = 3


@dataclass
class WordServer:
    """Records its requests. `status`, `cut_after`, `cut_every`, `usage` and `garbage` configure failures."""

    url: str = ""
    output: str = "content"
    """The field of a chat's deltas that has the text."""
    status: int = 200
    cut_after: int | None = None
    """Tokens after which a stream breaks off."""
    cut_every: int | None = None
    """One of this many streams breaks off at its start."""
    usage: dict[str, Any] | None = None
    """In place of the counts of tokens."""
    wait_s: float = 0.0
    """Before each answer."""
    garbage: bytes | None = None
    """Sent as the first event of each stream."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        await asyncio.sleep(self.wait_s)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        chat = request.path.endswith("chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        usage = {"prompt_tokens": len(prompt.split()) + TEMPLATE_TOKENS, "completion_tokens": body["max_tokens"]}
        if not body["stream"]:
            return web.json_response({"usage": usage if self.usage is None else self.usage})
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._stream(request, chat, body["max_tokens"], usage)
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, chat: bool, tokens: int, usage: dict[str, int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if chat:  # the role comes first and is not a token
            await _event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        cut_after = 0 if self.cut_every and len(self.bodies) % self.cut_every == 0 else self.cut_after
        if self.garbage is not None:
            await response.write(b"data: " + self.garbage + b"\n\n")
        for count in range(tokens):
            if count == cut_after:
                return response
            await _event(response, {"choices": [{"delta": {self.output: "w "}} if chat else {"text": "w "}]})
        await _event(response, {"choices": [], "usage": usage if self.usage is None else self.usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _event(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await asyncio.sleep(0)  # let other requests run, so that they overlap


@pytest.fixture
async def server() -> AsyncIterator[WordServer]:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    server = WordServer()
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", server.handle)
    app.router.add_post("/page/{path:.*}", page)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()
