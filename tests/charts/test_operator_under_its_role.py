"""The operator with the chart's roles and no others; and what these roles keep from it.

On the API server that KUBEBUILDER_ASSETS names its pods go into a namespace that enforces the `restricted` Pod Security
Standard as well; the emulated API knows roles alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.release import assert_nothing_was_forbidden, write_release
from llmservice_local.client import DEPLOYMENTS, EVENTS, NAMESPACES, PODS, KubeClient, Resource, connect
from llmservice_local.cluster import ClusterSettings, LocalCluster
from llmservice_local.errors import ApiError
from llmservice_local.manifests import read_release
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.resource import API_VERSION, PLURAL

pytestmark = pytest.mark.slow

Object = dict[str, Any]
SERVICES = Resource(API_VERSION, PLURAL)
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC: Object = {
    "model": {"uri": "hf://org/name", "shape": SHAPE},
    "resources": {"gpu": {"product": "l4"}},
    "engine": {"maxModelLen": 512, "maxLoras": 1},
    "replicas": 2,
}
RESTRICTED: Object = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": "team-a", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
}
WAIT_S = 40.0


@dataclass
class Installed:
    """A cluster whose operator has the chart's roles: the administrator's client, and one with the operator's token."""

    kube: KubeClient
    operator: KubeClient
    state_dir: Path
    namespaced: bool


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not (found := await look()):
            await asyncio.sleep(0.1)
        return found


@pytest.fixture(params=[{}, {"namespaces": ["team-a"]}], ids=["whole cluster", "one namespace"])
async def installed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Installed]:
    release = read_release(write_release(tmp_path / "release.yaml", request.param))
    settings = ClusterSettings(state_dir=tmp_path, release=release, gateway=False)
    async with LocalCluster(settings) as cluster, connect(cluster.endpoint, "test") as kube:
        apply = {"content_type": "application/apply-patch+yaml", "query": {"fieldManager": "test"}}
        await kube.request("PATCH", NAMESPACES.path(name="team-a"), RESTRICTED, **apply)
        kubeconfig = yaml.safe_load((tmp_path / "operator.kubeconfig").read_text(encoding="utf-8"))
        token = kubeconfig["users"][0]["user"]["token"]
        async with connect(replace(cluster.endpoint, token=token), "test") as operator:
            yield Installed(kube, operator, tmp_path, namespaced=bool(request.param))


async def test_its_roles_are_all_that_it_needs_and_its_pods_are_admitted(installed: Installed) -> None:
    kube = installed.kube
    service = {"apiVersion": API_VERSION, "kind": "LLMService", "metadata": {"name": "tiny"}, "spec": SPEC}
    created = await kube.create(SERVICES, "team-a", service)

    async def pods() -> list[Object]:
        found: list[Object] = (await kube.list(PODS, "team-a"))["items"]
        return found if len(found) == 2 else []

    assert await until(pods)
    for kind in CHILD_KINDS.values():
        if kind.built_in:
            name = "tiny-adapters" if kind.name == "ConfigMap" else "tiny"
            assert await kube.get(Resource(kind.api_version, kind.plural), "team-a", name)

    edit = {"spec": {"networkPolicy": {"enabled": False}, "drainTimeout": "30s"}}
    await kube.merge(SERVICES, created, edit)

    async def rolled() -> bool:
        deployment = await kube.get(DEPLOYMENTS, "team-a", "tiny")
        policies = await kube.list(Resource("networking.k8s.io/v1", "networkpolicies"), "team-a")
        grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return grace == 40 and not policies["items"]

    assert await until(rolled)

    async def is_reported() -> bool:
        status = (await kube.get(SERVICES, "team-a", "tiny")).get("status") or {}
        events = (await kube.list(EVENTS, "team-a"))["items"]
        reported = any(event["involvedObject"]["kind"] == "LLMService" for event in events)
        return status.get("observedGeneration") == 2 and reported

    assert await until(is_reported)
    assert_nothing_was_forbidden(installed.state_dir, "llmservice-operator")
    assert "forbidden" not in (installed.state_dir / "components" / "operator.log").read_text().lower()


async def test_it_may_not_do_what_it_has_no_need_of(installed: Installed) -> None:
    roles = Resource("rbac.authorization.k8s.io/v1", "roles")
    for method, resource, name in (
        ("GET", Resource("v1", "secrets"), ""),
        ("POST", PODS, ""),
        ("DELETE", PODS, "some"),
        ("DELETE", DEPLOYMENTS, "some"),
        ("PATCH", SERVICES, "some"),
        ("POST", roles, ""),
    ):
        body = {"metadata": {"name": "some"}} if method in {"POST", "PATCH"} else None
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with pytest.raises(ApiError, match="is forbidden: User") as refusal:
            await installed.operator.request(method, resource.path("team-a", name), body, content_type=content_type)
        assert refusal.value.code == 403, (method, resource)


async def test_of_a_pod_it_may_change_the_deletion_cost_and_nothing_else(installed: Installed) -> None:
    """RBAC knows no fields: a policy of the chart's does."""
    if installed.namespaced:
        pytest.skip("a release for some namespaces installs nothing cluster-wide")
    kube, cost = installed.kube, "controller.kubernetes.io/pod-deletion-cost"
    container = {"name": "c", "image": "registry.invalid/none", "securityContext": {"runAsNonRoot": True}}
    await kube.create(PODS, "default", {"metadata": {"name": "some"}, "spec": {"containers": [container]}})

    async def patch(body: Object) -> Object:
        path = PODS.path("default", "some")
        return await installed.operator.request("PATCH", path, body, content_type="application/merge-patch+json")

    async def refused() -> bool:  # a real API server takes a moment to put a policy in force
        try:
            await patch({"metadata": {"labels": {"probe": "x"}}})
        except ApiError:
            return True
        return False

    await until(refused)
    for number in ("1", "2", None):
        patched = await patch({"metadata": {"annotations": {cost: number}}})
        assert (patched["metadata"].get("annotations") or {}).get(cost) == number
    for body, why in (
        ({"metadata": {"annotations": {"other": "x"}}}, "may change only the deletion cost"),
        ({"metadata": {"labels": {"app": "x"}}}, "may change no pod's labels"),
        ({"metadata": {"finalizers": ["example.com/keep"]}}, "may change no pod's owners or finalizers"),
        ({"spec": {"activeDeadlineSeconds": 1}}, "may change no pod's spec"),
    ):
        with pytest.raises(ApiError, match=why):
            await patch(body)


@pytest.mark.skipif("KUBEBUILDER_ASSETS" not in os.environ, reason="the emulated API has no pod security admission")
async def test_the_namespace_really_refuses_other_pods(installed: Installed) -> None:
    bad = {"metadata": {"name": "bad"}, "spec": {"containers": [{"name": "c", "image": "i"}], "hostNetwork": True}}

    with pytest.raises(ApiError, match="violates PodSecurity"):
        await installed.kube.create(PODS, "team-a", bad)
