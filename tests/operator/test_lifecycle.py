"""What users do to services, against the operator's process and the cluster's controllers.

The node has no GPU, so that no pod runs: the test sets which are ready. The operator's tick is a minute, so that all
changes here come from watch events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.wait import until
from harness.world.operator_process import SHAPE
from llmservice_local.client import DEPLOYMENTS, PODS, REPLICA_SETS, KubeClient, Resource, connect
from llmservice_local.cluster import ClusterSettings, LocalCluster
from llmservice_local.errors import ApiError
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.resource import API_VERSION, PLURAL

pytestmark = pytest.mark.slow

Object = dict[str, Any]
SERVICES = Resource(API_VERSION, PLURAL)
BUILT_IN = {kind.name: Resource(kind.api_version, kind.plural) for kind in CHILD_KINDS.values() if kind.built_in}
SPEC: Object = {
    "model": {"uri": "hf://org/name", "shape": SHAPE},
    "resources": {"gpu": {"product": "l4"}},
    "engine": {"maxModelLen": 512, "maxLoras": 1},
    "replicas": 2,
}


@dataclass
class World:
    """A cluster with one service, `tiny`."""

    kube: KubeClient
    cluster: LocalCluster

    async def create(self, **spec: Any) -> Object:
        manifest = {"apiVersion": API_VERSION, "kind": "LLMService", "metadata": {"name": "tiny"}}
        return await self.kube.create(SERVICES, "default", {**manifest, "spec": {**SPEC, **spec}})

    async def edit(self, **spec: Any) -> None:
        service = await self.kube.get(SERVICES, "default", "tiny")
        await self.kube.merge(SERVICES, service, {"spec": spec})

    async def delete(self) -> None:
        await self.kube.delete(SERVICES, await self.kube.get(SERVICES, "default", "tiny"))

    async def find(self, resource: Resource, name: str | None = None) -> Object | None:
        name = name or ("tiny-adapters" if resource.plural == "configmaps" else "tiny")
        try:
            return await self.kube.get(resource, "default", name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def pods(self, word: str = "") -> list[Object]:
        """Those that are not terminating, and contain this word."""
        listed = (await self.kube.list(PODS, "default"))["items"]
        return [pod for pod in listed if "deletionTimestamp" not in pod["metadata"] and word in str(pod)]

    async def make_ready(self, pods: list[Object]) -> None:
        for pod in pods:
            conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
            status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions}
            await self.kube.merge(PODS, pod, {"status": status}, subresource="status")

    async def running(self, count: int) -> list[Object]:
        """Wait for so many pods, and make them ready."""

        async def look() -> list[Object]:
            found = [pod for pod in await self.pods() if "PodScheduled" in str(pod)]  # else its writer meets ours
            return found if len(found) == count else []

        pods: list[Object] = await until(look)
        await self.make_ready(pods)
        return pods

    async def is_empty(self) -> bool:
        """Whether nothing of the service is left."""
        left = [
            found["metadata"]["name"]
            for resource in (*BUILT_IN.values(), REPLICA_SETS, PODS)
            for found in (await self.kube.list(resource, "default"))["items"]
        ]
        return not [name for name in left if name.startswith("tiny")]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    settings = ClusterSettings(state_dir=tmp_path, gateway=False, operator_arguments=("--tick", "60"))
    async with LocalCluster(settings) as cluster, connect(cluster.endpoint, "test") as kube:
        yield World(kube, cluster)


async def test_a_change_replaces_the_pods_one_by_one_and_keeps_the_deployment(world: World) -> None:
    await world.create()
    before = await world.running(2)
    deployment = await world.find(DEPLOYMENTS)
    assert deployment is not None

    await world.edit(model={"servedName": "renamed"})
    await until(lambda: world.pods("renamed"))
    assert len(await world.pods()) == 3, "an old pod goes only once a new one is ready"

    async def replaced() -> bool:
        await world.make_ready(await world.pods("renamed"))
        left = {pod["metadata"]["name"] for pod in await world.pods()}
        return len(await world.pods("renamed")) == 2 and not left & {pod["metadata"]["name"] for pod in before}

    assert await until(replaced)
    after = await world.find(DEPLOYMENTS)
    assert after is not None
    assert after["metadata"]["uid"] == deployment["metadata"]["uid"]
    assert after["spec"]["selector"] == deployment["spec"]["selector"]


async def test_a_recreated_service_gets_new_children(world: World) -> None:
    old = await world.create()
    await world.running(2)
    await world.delete()
    new = await world.create(replicas=1, engine={"maxModelLen": 256, "maxLoras": 1})

    async def afresh() -> bool:
        children = [await world.find(resource) for resource in BUILT_IN.values()]
        owners = {child and child["metadata"]["ownerReferences"][0]["uid"] for child in children}
        return owners == {new["metadata"]["uid"]}

    assert await until(afresh)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    (pod,) = await world.running(1)
    arguments = pod["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--max-model-len") + 1] == "256"
    events = (await world.kube.request("GET", "/api/v1/namespaces/default/events"))["items"]
    assert not [event for event in events if event["reason"] == "NameConflict"]


async def test_deleting_in_the_middle_of_a_rollout_leaves_nothing(world: World) -> None:
    await world.create()
    await world.running(2)
    await world.edit(resources={"gpu": {"product": "l40s"}})
    await until(lambda: world.pods("NVIDIA-L40S"))

    await world.delete()

    assert await until(world.is_empty)
    await asyncio.sleep(0.5)  # a pass that was under way by then would have brought something back
    assert await world.is_empty()


async def test_deleting_while_no_operator_runs_leaves_nothing(world: World) -> None:
    await world.create()
    await world.running(2)
    service = await world.kube.get(SERVICES, "default", "tiny")
    assert "finalizers" not in service["metadata"]
    assert not [name for name in service["metadata"].get("annotations") or {} if "kopf" in name]
    await world.cluster.components["operator"].stop()

    await world.delete()

    assert await until(world.is_empty)


async def test_a_deleted_child_is_created_again(world: World) -> None:
    await world.create()
    await until(lambda: world.find(DEPLOYMENTS))
    for resource in BUILT_IN.values():
        child = await world.find(resource)
        assert child is not None
        await world.kube.delete(resource, child)

        async def back(resource: Resource = resource, old: str = child["metadata"]["uid"]) -> bool:
            found = await world.find(resource)
            return found is not None and found["metadata"]["uid"] != old

        assert await until(back)


async def test_edits_by_other_clients_are_undone_and_additions_stay(world: World) -> None:
    await world.create()
    await until(lambda: world.find(DEPLOYMENTS))
    edits: dict[str, Object] = {
        "Deployment": {"replicas": 9},
        "Service": {"selector": {"app.kubernetes.io/instance": "other"}},
        "PodDisruptionBudget": {"maxUnavailable": 5},
        "NetworkPolicy": {"policyTypes": ["Ingress"]},
    }
    specs = {}
    for kind, edit in edits.items():
        child = await world.find(BUILT_IN[kind])
        assert child is not None
        specs[kind] = child["spec"]
        patch = {"metadata": {"annotations": {"team": "a"}}, "spec": edit}
        await world.kube.merge(BUILT_IN[kind], child, patch)

    async def undone() -> bool:
        found = {kind: await world.find(BUILT_IN[kind]) for kind in edits}
        assert all(child and child["metadata"]["annotations"]["team"] == "a" for child in found.values())
        return all(child and child["spec"] == specs[kind] for kind, child in found.items())

    assert await until(undone)
