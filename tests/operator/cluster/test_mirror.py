"""Everything that is followed, against an API server: what no watch told of is found by a list."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harness.jumping_loop import JumpingLoop
from harness.whole_operator import RESYNC_S, TICK_S
from harness.whole_world import MONITORING, World, whole_world
from llmservice_operator.api.kinds import CHILD_KINDS, FOLLOWED
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.mirror import Mirror
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.monitoring.metrics import OperatorMetrics

SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
KEY = ("team-a", "tiny")
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}


Told = list[tuple[str, str]]


def mirror_of(kube: KubeClient, cache: ObjectCache, told: Told, *namespaces: str, **more: Any) -> Mirror:
    """One that notes the kinds and names of what is news."""

    def changed(kind: str, obj: dict[str, Any], *, news: bool) -> None:
        assert news
        told.append((kind, obj["metadata"]["name"]))

    return Mirror(kube, cache, changed, OperatorMetrics().process, namespaces, silence_s=70, resync_s=300, **more)


async def create(kube: KubeClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return await kube.request("POST", path, body=body, content_type="application/json")


def pod(name: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/instance": "tiny"}
    labels["app.kubernetes.io/managed-by"] = "llmservice-operator"
    spec = {"containers": [{"name": "server", "image": "img:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def test_creations_changes_and_deletions_are_found_once(kube: KubeClient, manifest_of: Any) -> None:
    cache, told = ObjectCache(), Told()
    mirror = mirror_of(kube, cache, told)

    await create(kube, SERVICES, manifest_of())
    await create(kube, "/api/v1/namespaces/team-a/pods", pod("tiny-1"))
    assert await mirror.list_all() == 2
    assert cache.services() == [KEY]
    assert await mirror.list_all() == 0

    await kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"replicas": 3}})
    await kube.request("DELETE", "/api/v1/namespaces/team-a/pods/tiny-1", query={"gracePeriodSeconds": "0"})
    assert await mirror.list_all() == 2

    assert told == [("LLMService", "tiny"), ("Pod", "tiny-1"), ("LLMService", "tiny"), ("Pod", "tiny-1")]
    assert cache.pods(*KEY) == []
    service = cache.service(*KEY)
    assert service is not None
    assert service["spec"]["replicas"] == 3


async def test_a_collection_of_several_pages_is_read_to_its_end(kube: KubeClient, manifest_of: Any) -> None:
    for number in range(501):
        await create(kube, SERVICES, manifest_of(f"tiny-{number}"))
    cache = ObjectCache()

    await mirror_of(kube, cache, Told()).list_all()

    assert len(cache.services()) == 501


async def test_other_namespaces_than_those_named_are_not_listed(kube: KubeClient, manifest_of: Any) -> None:
    await create(kube, SERVICES, manifest_of())
    elsewhere = manifest_of()
    elsewhere["metadata"]["namespace"] = "default"
    await create(kube, SERVICES.replace("team-a", "default"), elsewhere)
    cache, paths = ObjectCache(), []
    kube.answered = lambda _, path, *__: paths.append(path)

    await mirror_of(kube, cache, Told(), "default").list_all()

    assert cache.services() == [("default", "tiny")]
    assert all("/namespaces/default/" in path for path in paths)


async def test_the_cache_is_whole_once_all_was_listed_and_follows_then(kube: KubeClient, manifest_of: Any) -> None:
    await create(kube, SERVICES, manifest_of())
    cache, told = ObjectCache(), Told()
    settled: list[int] = []
    mirror = mirror_of(kube, cache, told, settle=lambda: settled.append(len(cache)))
    assert not mirror.whole.is_set()
    following = asyncio.create_task(mirror.run())
    async with asyncio.timeout(10):
        await mirror.whole.wait()
        assert cache.services() == [KEY]
        assert settled == [1]
        assert all(cache.follows(followed.kind.name) for followed in FOLLOWED)

        await create(kube, "/api/v1/namespaces/team-a/pods", pod("tiny-1"))
        while ("Pod", "tiny-1") not in told:
            await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.wait([following])


def test_a_kind_whose_crd_comes_later_is_taken_up_within_one_interval(tmp_path: Path) -> None:
    async def play() -> list[set[str]]:
        async with whole_world(tmp_path) as world:
            tasks = [asyncio.create_task(world.cluster.run()), asyncio.create_task(world.operator().run())]
            monitored = {"model": {"uri": "hf://org/name", "shape": SHAPE}, "engine": {"maxModelLen": 512}}
            world.create_service({**monitored, "monitoring": {"podMonitor": True, "prometheusRule": True}})
            await asyncio.sleep(10)
            before = names_of(world)
            for kind in MONITORING:
                world.install(kind)
            await asyncio.sleep(RESYNC_S + 1.2 * TICK_S)
            after = names_of(world)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [before, after]

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        before, after = runner.run(play())

    assert before >= {"Deployment", "Service"}
    assert after - before == set(MONITORING)


def names_of(world: World) -> set[str]:
    """The kinds of the children that the service has."""
    kinds = [kind for kind in world.registry.kinds if kind.name in CHILD_KINDS]
    return {kind.name for kind in kinds if world.registry.select(kind, "team-a")}
