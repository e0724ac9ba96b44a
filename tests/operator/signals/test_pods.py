from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from llmservice_operator.pods.pod import Pod
from llmservice_operator.signals.pods import PodSignals


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Pods on 127.0.0.x: .1 counts its scrapes, .2 hangs, .3 answers nonsense, .4 refuses."""
    scrapes = 0

    async def metrics(request: web.Request) -> web.Response:
        nonlocal scrapes
        host = request.url.host
        if host == "127.0.0.2":
            await asyncio.sleep(30)
        if host == "127.0.0.3":
            return web.Response(text="<html>")
        if host == "127.0.0.4":
            return web.Response(status=503)
        scrapes += 1
        return web.Response(text=f"llmservice_num_requests_running {scrapes}\nllmservice_num_requests_waiting 0\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def pod(number: int) -> Pod:
    return Pod(f"pod-{number}", f"uid-{number}", f"127.0.0.{number}", 0.0, ready=True, terminating=False)


async def test_one_silent_pod_neither_delays_nor_hides_the_others(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session, port, timeout_s=0.2)

        histories = await signals.read("team-a", [pod(n) for n in (1, 2, 3, 4)], 60.0, 1000.0)

    assert list(histories) == ["pod-1"]


async def test_the_window_holds_what_was_scraped_within_it(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session, port)
        for now in (1000.0, 1030.0, 1070.0):
            histories = await signals.read("team-a", [pod(1)], 60.0, now)

    assert [(one.time_s, one.running) for one in histories["pod-1"]] == [(1030.0, 2), (1070.0, 3)]


async def test_a_pod_that_comes_back_under_the_same_name_has_no_past(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session, port)
        await signals.read("team-a", [pod(1)], 60.0, 1000.0)
        reborn = Pod("pod-1", "another-uid", "127.0.0.1", 0.0, ready=True, terminating=False)

        histories = await signals.read("team-a", [reborn], 60.0, 1010.0)

    assert len(histories["pod-1"]) == 1
