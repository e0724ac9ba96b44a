"""The lists beside kopf's own, against an API server: what no watch reports is found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.world.jumping_loop import JumpingLoop
from harness.world.operator_process import SHAPE
from harness.world.whole_operator import TICK_S
from harness.world.whole_world import FROM_CRDS, World, whole_world
from llmservice_operator.api.kinds import CHILD_KINDS, FOLLOWED
from llmservice_operator.cluster import kube_client
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.framework.resync import DISCOVER_S, Resync
from llmservice_operator.monitoring.metrics import OperatorMetrics

SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
PODS = "/api/v1/namespaces/team-a/pods"
KEY = ("team-a", "tiny")


Reported = list[tuple[str, str]]


def resync_of(kube: KubeClient, cache: ObjectCache, reported: Reported, *namespaces: str, **more: Any) -> Resync:
    """One that notes the kinds and names of what is new."""

    def changed(kind: str, obj: dict[str, Any], *, news: bool) -> None:
        assert news
        reported.append((kind, obj["metadata"]["name"]))

    return Resync(kube, cache, changed, OperatorMetrics().process, namespaces, **{"interval_s": 300.0, **more})


@asynccontextmanager
async def running(resync: Resync) -> AsyncIterator[None]:
    """From the first list of everything on."""
    task = asyncio.create_task(resync.run())
    try:
        async with asyncio.timeout(10):
            await resync.complete.wait()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.01)


async def create(kube: KubeClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return await kube.request("POST", path, body=body, content_type="application/json")


def pod(name: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/instance": "tiny"}
    labels["app.kubernetes.io/managed-by"] = "llmservice-operator"
    spec = {"containers": [{"name": "server", "image": "img:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def test_the_first_list_fills_the_cache_and_later_ones_find_each_difference_once(
    kube: KubeClient, manifest_of: Any
) -> None:
    await create(kube, SERVICES, manifest_of())
    await create(kube, PODS, pod("tiny-1"))
    cache, reported = ObjectCache(), Reported()
    settled: list[int] = []
    async with running(
        resync_of(kube, cache, reported, interval_s=0.05, on_complete=lambda: settled.append(len(cache)))
    ):
        assert cache.services() == [KEY]
        assert settled[0] == 2
        assert all(cache.follows(followed.kind.name) for followed in FOLLOWED)

        await kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"replicas": 3}})
        await kube.request("DELETE", f"{PODS}/tiny-1", query={"gracePeriodSeconds": "0"})
        await until(lambda: len(reported) >= 4)

    assert sorted(reported) == [("LLMService", "tiny")] * 2 + [("Pod", "tiny-1")] * 2
    assert cache.pods(*KEY) == []
    service = cache.service(*KEY)
    assert service is not None
    assert service["spec"]["replicas"] == 3


async def test_a_kind_that_kopf_lists_anew_is_listed_at_once_and_not_the_first_time(kube: KubeClient) -> None:
    await create(kube, PODS, pod("tiny-1"))
    cache, reported = ObjectCache(), Reported()
    resync = resync_of(kube, cache, reported)
    async with running(resync):
        resync.listed("Pod", "/api/v1/pods")
        await kube.request("DELETE", f"{PODS}/tiny-1", query={"gracePeriodSeconds": "0"})
        await asyncio.sleep(0.2)
        assert len(cache) == 1
        resync.listed("Pod", "/api/v1/pods")

        await until(lambda: len(cache) == 0)


async def test_a_collection_of_several_pages_is_read_to_its_end(
    kube: KubeClient, manifest_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "PAGE", 2)
    for number in range(5):
        await create(kube, SERVICES, manifest_of(f"tiny-{number}"))
    cache = ObjectCache()

    async with running(resync_of(kube, cache, Reported())):
        assert len(cache.services()) == 5


async def test_other_namespaces_than_those_named_are_not_listed(kube: KubeClient, manifest_of: Any) -> None:
    await create(kube, SERVICES, manifest_of())
    elsewhere = manifest_of()
    elsewhere["metadata"]["namespace"] = "default"
    await create(kube, SERVICES.replace("team-a", "default"), elsewhere)
    cache, paths = ObjectCache(), []
    kube.answered = lambda _, path, *__: paths.append(path)

    async with running(resync_of(kube, cache, Reported(), "default")):
        assert cache.services() == [("default", "tiny")]
    assert all("/namespaces/default/" in path for path in paths)


def test_a_crd_that_is_installed_later_is_used_within_a_minute(tmp_path: Path) -> None:
    async def play() -> list[set[str]]:
        async with whole_world(tmp_path) as world:
            tasks = [asyncio.create_task(world.cluster.run()), asyncio.create_task(world.operator().run())]
            spec = {"model": {"uri": "hf://org/name", "shape": SHAPE}, "engine": {"maxModelLen": 512}}
            world.create_service({**spec, "access": "direct", "gateway": {"inferencePool": True}})
            await asyncio.sleep(10)
            before = names_of(world)
            for kind in FROM_CRDS:
                world.install(kind)
            await asyncio.sleep(DISCOVER_S + 1.2 * TICK_S)
            after = names_of(world)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [before, after]

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        before, after = runner.run(play())

    assert before >= {"Deployment", "Service"}
    assert after - before == set(FROM_CRDS)


def names_of(world: World) -> set[str]:
    """The kinds of the children that the service has."""
    kinds = [kind for kind in world.registry.kinds if kind.name in CHILD_KINDS]
    return {kind.name for kind in kinds if world.registry.select(kind, "team-a")}
