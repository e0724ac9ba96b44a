"""Polling pods for their adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_gateway.routing.adapters import AdapterPoll
from llmservice_gateway.routing.routes import Backend


class Pod:
    def __init__(self) -> None:
        self.report: dict[str, Any] = {"adapters": []}
        self.url = ""

    async def answer(self, _request: web.Request) -> web.Response:
        return web.json_response(self.report)


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    pod = Pod()
    app = web.Application()
    app.router.add_get("/sizing", pod.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pod.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield pod
    await runner.cleanup()


def entry(name: str, state: str = "loaded") -> dict[str, str]:
    return {"name": name, "state": state, "version": "1"}


async def test_changes_are_told_and_a_silent_pod_keeps_its_adapters(pod: Pod) -> None:
    backends = [Backend("uid", "a", pod.url)]
    changes: list[object] = []
    poll = AdapterPoll(lambda: backends, lambda: changes.append(poll.reported))
    async with aiohttp.ClientSession() as session:
        long, newer = (entry(name, "failed") | {"error": 100_000 * "x"} for name in ("broken", "poet"))
        pod.report = {"adapters": [entry("poet"), entry("bard", "evicted"), long, newer]}
        await poll.poll(session)
        await poll.poll(session)
        pod.report = {"detail": "no server of ours"}
        await poll.poll(session)
        assert changes == [{"uid": {"broken": 100_000 * "x", "poet": None, "bard": None}}]
        backends.clear()
        await poll.poll(session)
        assert changes[1:] == [{}]
