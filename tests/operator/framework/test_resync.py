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
from llmservice_local.client import Endpoint
from llmservice_operator.api.kinds import CHILD_KINDS, FOLLOWED
from llmservice_operator.cluster import kube_client
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.framework.resync import DISCOVER_S, Resync
from llmservice_operator.monitoring.metrics import OperatorMetrics

SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
PODS = "/api/v1/namespaces/team-a/pods"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
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


@pytest.fixture
async def tenant(kube: KubeClient, api_url: str, kubeconfig: Path) -> AsyncIterator[KubeClient]:
    """A client that may read what `grant` names, and nothing before."""
    accounts = "/api/v1/namespaces/team-a/serviceaccounts"
    await create(kube, accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "tenant"}})
    issued = await create(kube, f"{accounts}/tenant/token", {"spec": {}})
    Endpoint(api_url, issued["status"]["token"]).write_kubeconfig(kubeconfig)
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    await create(kube, f"{RBAC}/clusterroles", {"kind": "ClusterRole", "metadata": {"name": "all"}, "rules": [rule]})
    client = await KubeClient.connect()
    yield client
    await client.close()


async def grant(kube: KubeClient, namespace: str) -> None:
    subject = {"kind": "ServiceAccount", "name": "tenant", "namespace": "team-a"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "all"}
    binding = {"kind": "RoleBinding", "metadata": {"name": "all"}, "roleRef": role, "subjects": [subject]}
    await create(kube, f"{RBAC}/namespaces/{namespace}/rolebindings", binding)


def listed_by_kopf(resync: Resync, namespace: str) -> None:
    for one in FOLLOWED:
        resync.listed(one.kind.name, one.path(namespace))


async def test_a_namespace_that_may_not_be_read_is_left_out_until_it_may(
    kube: KubeClient, tenant: KubeClient, manifest_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await create(kube, SERVICES, manifest_of())
    elsewhere = manifest_of()
    elsewhere["metadata"]["namespace"] = "default"
    await create(kube, SERVICES.replace("team-a", "default"), elsewhere)
    await grant(kube, "team-a")
    cache, searched = ObjectCache(), []

    async def discover(group: str) -> None:
        searched.append(group)

    resync = resync_of(tenant, cache, Reported(), "default", "team-a", discover=discover)
    async with running(resync):
        assert cache.services() == [KEY]
        assert cache.is_read("team-a")
        assert not cache.is_read("default")
        assert "resync of pods failed, will be repeated: GET /api/v1/namespaces/default/pods: 403" in caplog.text
        listed_by_kopf(resync, "team-a")
        assert resync._discover_in_s() == DISCOVER_S, "kopf repeats its lists of the other namespace by itself"

        await grant(kube, "default")
        listed_by_kopf(resync, "default")

        await until(lambda: cache.is_read("default"))
        assert len(cache.services()) == 2
        assert searched == []


async def test_a_namespace_that_may_no_longer_be_read_keeps_its_objects_and_the_others_are_listed(
    kube: KubeClient, tenant: KubeClient, manifest_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await create(kube, SERVICES, manifest_of())
    await grant(kube, "team-a")
    await grant(kube, "default")
    cache = ObjectCache()
    async with running(resync_of(tenant, cache, Reported(), "team-a", "default", interval_s=0.05)):
        await kube.request("DELETE", f"{RBAC}/namespaces/team-a/rolebindings/all")
        await until(lambda: "namespaces/team-a/pods: 403" in caplog.text)
        await create(kube, PODS.replace("team-a", "default"), pod("tiny-1"))

        await until(lambda: cache.child("Pod", "default", "tiny-1") is not None)
        assert cache.services() == [KEY]
        assert cache.is_read("team-a")


@pytest.mark.parametrize("namespaces", [(), ("team-a", "default")])
async def test_nothing_is_complete_while_nothing_may_be_read(
    namespaces: tuple[str, ...], kube: KubeClient, tenant: KubeClient
) -> None:
    resync = resync_of(tenant, ObjectCache(), Reported(), *namespaces, interval_s=0.05)
    refused = asyncio.Event()
    tenant.answered = lambda _, path, status, __: refused.set() if "deployments" in path and status == 403 else None
    task = asyncio.create_task(resync.run())
    async with asyncio.timeout(10):
        await refused.wait()
    await asyncio.sleep(0.2)
    assert not resync.complete.is_set()
    task.cancel()
    await asyncio.wait([task])


async def test_a_namespace_whose_list_fails_is_waited_for(kube: KubeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a refusal leaves a namespace out."""
    monkeypatch.setattr("llmservice_operator.framework.resync._RETRY_S", 0.01)
    cache, failures = ObjectCache(), [500, 503, 0]
    resync = resync_of(kube, cache, Reported(), "team-a", "default")
    ask = kube.list_all

    async def list_all(path: str, *rest: Any) -> Any:
        if path == PODS and failures:
            assert not resync.complete.is_set()
            raise KubeError(failures.pop(), "down")
        return await ask(path, *rest)

    monkeypatch.setattr(kube, "list_all", list_all)
    async with running(resync):
        assert failures == []
        assert cache.is_read("team-a")


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
