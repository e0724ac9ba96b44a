"""List and watch, through everything that an API server does to its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from llmservice_gateway.reflector import APIStatusError, Reflector


def item(name: str, **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default", "resourceVersion": "1"}, **fields}


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
async def reflector(cluster: Any, naps: list[float]) -> Any:
    async def nap(seconds: float) -> None:
        naps.append(seconds)

    cluster.items["pods"] = [item("a")]
    reflector = Reflector(cluster, "/api/v1/pods", lambda: None, "app=x", sleep=nap)
    task = asyncio.create_task(reflector.run())
    yield reflector
    task.cancel()
    await asyncio.wait([task])


async def names(reflector: Reflector, expected: set[str]) -> None:
    await eventually(lambda: {found["metadata"]["name"] for found in reflector.objects()} == expected)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_cache_follows_additions_changes_and_deletions(reflector: Reflector, cluster: Any) -> None:
    await names(reflector, {"a"})
    cluster.emit("pods", "ADDED", item("b"))
    await names(reflector, {"a", "b"})
    cluster.emit("pods", "MODIFIED", item("b", status="x"))
    await eventually(lambda: any(found.get("status") == "x" for found in reflector.objects()))
    cluster.emit("pods", "DELETED", item("a"))
    await names(reflector, {"b"})


async def test_watch_that_the_server_ends_continues_from_the_last_version(reflector: Reflector, cluster: Any) -> None:
    await reflector.synced.wait()
    cluster.emit("pods", "BOOKMARK", item("ignored"))
    cluster.events["pods"].put_nowait(None)
    await eventually(lambda: len([call for call in cluster.calls if call[0] == "watch"]) == 2)
    assert [call[0] for call in cluster.calls] == ["list", "watch", "watch"]
    assert cluster.calls[-1][2]["resourceVersion"] == "2"
    assert cluster.calls[-1][2]["labelSelector"] == "app=x"


@pytest.mark.parametrize("told", ["by status", "by event"])
async def test_expired_version_is_answered_with_a_new_list_at_once(
    reflector: Reflector, cluster: Any, naps: list[float], told: str
) -> None:
    await names(reflector, {"a"})
    cluster.items["pods"] = [item("b")]
    if told == "by status":
        cluster.events["pods"].put_nowait(cluster.gone())
    else:
        cluster.events["pods"].put_nowait({"type": "ERROR", "object": {"code": 410, "message": "expired"}})
    await names(reflector, {"b"})
    assert naps == []


async def test_objects_are_kept_and_retries_slow_down_while_the_api_is_away(
    reflector: Reflector, cluster: Any, naps: list[float]
) -> None:
    await names(reflector, {"a"})
    cluster.list_failures = [aiohttp.ClientConnectionError("away") for _ in range(3)]
    cluster.events["pods"].put_nowait(APIStatusError(500, "etcd is gone"))
    await eventually(lambda: len(naps) == 4)
    await names(reflector, {"a"})
    assert naps[3] > naps[0]
    assert all(0 < seconds <= 30 for seconds in naps)


async def test_change_is_announced_after_the_cache_holds_it(cluster: Any) -> None:
    seen: list[set[str]] = []
    reflector = Reflector(
        cluster, "/api/v1/pods", lambda: seen.append({found["metadata"]["name"] for found in reflector.objects()})
    )
    task = asyncio.create_task(reflector.run())
    await reflector.synced.wait()
    cluster.emit("pods", "ADDED", item("a"))
    await eventually(lambda: seen == [set(), {"a"}])
    task.cancel()
    await asyncio.wait([task])
