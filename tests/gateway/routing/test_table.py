"""The live table, against an API server: which namespaces it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmservice_gateway.routing.table import Routing


@asynccontextmanager
async def following(api: Any, monkeypatch: pytest.MonkeyPatch, *namespaces: str) -> AsyncIterator[Routing]:
    monkeypatch.setattr("llmservice_gateway.reflector.FIRST_BACKOFF_S", 0.05)
    routing = Routing(api, namespaces)
    task = asyncio.create_task(routing.run())
    yield routing
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_namespace_that_may_not_be_read_is_left_out_until_it_may(
    api: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.refused = {"/namespaces/gone/": 403}
    cluster.emit("llmservices", "ADDED", {"metadata": {"name": "tiny", "namespace": "team-a"}})
    async with following(api, monkeypatch, "gone", "team-a") as routing:
        await eventually(lambda: routing.synced)
        assert "tiny" in routing.table.routes
        cluster.refused.clear()
        await eventually(lambda: not any(one.is_refused for one in routing._reflectors))
        assert routing.synced


@pytest.mark.parametrize(
    ("refused", "namespaces"),
    [
        ({"": 403}, ()),
        ({"": 403}, ("gone", "team-a")),
        ({"/namespaces/gone/": 500}, ("gone", "team-a")),
        ({"/namespaces/gone/pods": 403}, ("gone", "team-a")),
    ],
    ids=["whole cluster", "every namespace", "error of the API server", "pods alone"],
)
async def test_a_list_that_may_succeed_later_is_waited_for(
    refused: dict[str, int],
    namespaces: tuple[str, ...],
    api: Any,
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster.refused = refused
    async with following(api, monkeypatch, *namespaces) as routing:
        await eventually(lambda: caplog.text.count("cannot read") >= 4)
        assert not routing.synced
        cluster.refused = {}
        await eventually(lambda: routing.synced)
