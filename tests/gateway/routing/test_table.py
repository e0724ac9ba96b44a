"""The live table, against an API server: which namespaces it waits for, and what changes it."""

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


async def test_only_a_change_of_what_is_routed_by_builds_the_table_anew(
    api: Any, cluster: Any, start_pod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator writes the status of each busy service every few seconds."""
    pod = await start_pod("tiny-1")
    async with following(api, monkeypatch) as routing:
        await eventually(lambda: routing.synced)
        built: list[list[str]] = []
        routing.changed = lambda: built.append(
            [backend.name for routes in routing.table.routes.values() for route in routes for backend in route.backends]
        )
        cluster.emit("llmservices", "ADDED", service("Starting", waiting=0))
        await eventually(lambda: built == [[]])
        cluster.emit("pods", "ADDED", pod.manifest("tiny", ready=False))
        cluster.emit("pods", "MODIFIED", pod.manifest("tiny"))
        await eventually(lambda: built == [[], ["tiny-1"]])

        for waiting in range(3):
            cluster.emit("llmservices", "MODIFIED", service("Starting", waiting))
        cluster.emit("llmservices", "MODIFIED", service("Serving", waiting=3))
        await eventually(lambda: built == [[], ["tiny-1"], ["tiny-1"]])
        cluster.emit("pods", "MODIFIED", pod.manifest("tiny", ready=False))
        cluster.emit("pods", "DELETED", pod.manifest("tiny", ready=False))
        await eventually(lambda: built == [[], ["tiny-1"], ["tiny-1"], []])
        cluster.emit("llmservices", "DELETED", service("Serving", waiting=3))
        await eventually(lambda: len(built) == 5)


def service(reason: str, waiting: int) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "reason": reason, "message": ""}], "load": {"waiting": waiting}}
    return {"metadata": {"name": "tiny", "namespace": "default"}, "status": status}
