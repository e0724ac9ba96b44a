from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_operator.pods.pod import Pod, pods_of
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


def pod(number: int, port: int, uid: str = "") -> Pod:
    return Pod(
        name=f"pod-{number}",
        uid=uid or f"uid-{number}",
        ip=f"127.0.0.{number}",
        created_s=0.0,
        ready=True,
        terminating=False,
        metrics_port=port,
    )


async def test_one_silent_pod_neither_delays_nor_hides_the_others(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session, timeout_s=0.2)

        histories = await signals.read("team-a", [pod(n, port) for n in (1, 2, 3, 4)], 60.0, 1000.0)

    assert list(histories) == ["pod-1"]


async def test_the_window_holds_what_was_scraped_within_it(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session)
        for now in (1000.0, 1030.0, 1070.0):
            histories = await signals.read("team-a", [pod(1, port)], 60.0, now)

    assert [(one.time_s, one.running) for one in histories["pod-1"]] == [(1030.0, 2), (1070.0, 3)]


async def test_a_pod_that_comes_back_under_the_same_name_has_no_past(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session)
        await signals.read("team-a", [pod(1, port)], 60.0, 1000.0)
        reborn = pod(1, port, uid="another-uid")

        histories = await signals.read("team-a", [reborn], 60.0, 1010.0)

    assert len(histories["pod-1"]) == 1


async def test_pods_of_the_previous_version_are_scraped_beside_new_ones(port: int) -> None:
    """An earlier pod has the port `http` alone, and serves /metrics there."""

    def manifest(number: int, **ports: int) -> dict[str, Any]:
        named = [{"name": name, "containerPort": number} for name, number in ports.items()]
        return {
            "metadata": {"name": f"pod-{number}", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "containers": [{"name": "proxy", "ports": [{"containerPort": 1}]}, {"name": "server", "ports": named}]
            },
            "status": {"podIP": f"127.0.0.{number}"},
        }

    pods = pods_of([manifest(1, http=1, metrics=port), manifest(5, http=port)])
    async with aiohttp.ClientSession() as session:
        histories = await PodSignals(session).read("team-a", pods, 60.0, 1000.0)

    assert set(histories) == {"pod-1", "pod-5"}
