"""The operator at work under nothing but the chart's own roles, on the kube-apiserver that KUBEBUILDER_ASSETS names.

The emulated API knows no roles, so there is nothing to see there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import helm_python as helm
import pytest
import yaml

from llmservice_local.api.errors import ApiError
from llmservice_local.client import DEFINITIONS, DEPLOYMENTS, NAMESPACES, KubeClient, Resource, connect
from llmservice_local.control_plane import serve_control_plane
from llmservice_local.endpoint import Endpoint
from llmservice_local.ports import free_port
from llmservice_operator.crd import crd

CHART = Path(__file__).parents[2] / "charts" / "llmservice"
ASSETS = os.environ.get("KUBEBUILDER_ASSETS")
RBAC = "rbac.authorization.k8s.io/v1"
GRANTS = {
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "Role": Resource(RBAC, "roles"),
    "RoleBinding": Resource(RBAC, "rolebindings"),
    "ClusterRole": Resource(RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Resource(RBAC, "clusterrolebindings", namespaced=False),
}
SERVICES = Resource("serving.llmservice.io/v1alpha1", "llmservices")
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC: dict[str, Any] = {"model": {"uri": "hf://org/name", "shape": SHAPE}, "engine": {"maxModelLen": 512}}
ACCOUNT = "release-llmservice-operator"

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(ASSETS is None, reason="KUBEBUILDER_ASSETS names no kube-apiserver"),
]


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[tuple[KubeClient, Endpoint]]:
    assert ASSETS is not None
    async with AsyncExitStack() as stack:
        (tmp_path / "components").mkdir()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        endpoint = await stack.enter_async_context(serve_control_plane(Path(ASSETS), tmp_path, 0, session))
        kube = await stack.enter_async_context(connect(endpoint, "test"))
        for name in ("system", "team-a"):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await kube.create(NAMESPACES, None, body)
        await kube.create(DEFINITIONS, None, crd())
        yield kube, endpoint


async def grant(kube: KubeClient, values: dict[str, Any]) -> list[str]:
    """Install what the chart grants; returns the kinds."""
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(values, name="release", namespace="system")
    manifests = [one for path, text in rendered.items() if path.endswith(".yaml") for one in yaml.safe_load_all(text)]
    granted = [one for one in manifests if one and one["kind"] in GRANTS and "operator" in one["metadata"]["name"]]
    for one in granted:
        await kube.create(GRANTS[one["kind"]], one["metadata"].get("namespace"), one)
    return [one["kind"] for one in granted]


async def token(kube: KubeClient) -> str:
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    path = GRANTS["ServiceAccount"].path("system", ACCOUNT, "token")
    return str((await kube.request("POST", path, request))["status"]["token"])


async def has_replicas(kube: KubeClient, replicas: int) -> bool:
    try:
        deployment = await kube.get(DEPLOYMENTS, "team-a", "tiny")
    except ApiError:
        return False
    return bool(deployment["spec"]["replicas"] == replicas)


@pytest.mark.parametrize("namespaces", [[], ["team-a"]], ids=["cluster", "namespaced"])
async def test_nothing_that_the_operator_does_is_forbidden(
    namespaces: list[str], admin: tuple[KubeClient, Endpoint], tmp_path: Path
) -> None:
    kube, endpoint = admin
    kinds = await grant(kube, {"namespaces": namespaces})
    assert ("ClusterRole" in kinds) is (not namespaces)
    own = Endpoint(endpoint.url, await token(kube), endpoint.ca_file)
    own.write_kubeconfig(tmp_path / "kubeconfig")
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--server-image", "img:1", "--resync", "2", "--tick", "1"]
    flags += ["--leader-elect", f"--lease-name={ACCOUNT}", *(f"--namespace={name}" for name in namespaces)]
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig"), "POD_NAMESPACE": "system"}
    with (tmp_path / "operator.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmservice_planner", "operator", *flags, env=environment, stderr=log
        )
    try:
        await _create_change_and_turn_off(kube)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/metrics") as response,
        ):
            metrics = await response.text()
    finally:
        process.terminate()
        await process.wait()

    log_text = (tmp_path / "operator.log").read_text(encoding="utf-8")
    assert "llmservice_operator_leader 1.0" in metrics
    assert 'code="403"' not in metrics
    assert "orbidden" not in log_text
    assert "permission" not in log_text
    assert process.returncode == 0


async def _create_change_and_turn_off(kube: KubeClient) -> None:
    """What makes the operator create, patch and delete children, and post events."""
    metadata = {"name": "tiny", "namespace": "team-a"}
    body = {"apiVersion": SERVICES.api_version, "kind": "LLMService", "metadata": metadata, "spec": SPEC}
    async with asyncio.timeout(60):
        service = await kube.create(SERVICES, "team-a", {**body, "spec": {**SPEC, "replicas": 1}})
        while not await has_replicas(kube, 1):
            await asyncio.sleep(0.2)
        await kube.merge(SERVICES, service, {"spec": {"replicas": 2, "networkPolicy": {"enabled": False}}})
        while not await has_replicas(kube, 2):
            await asyncio.sleep(0.2)
        policies = Resource("networking.k8s.io/v1", "networkpolicies")
        while (await kube.list(policies, "team-a"))["items"]:
            await asyncio.sleep(0.2)
        while not (await kube.list(Resource("v1", "events"), "team-a"))["items"]:
            await asyncio.sleep(0.2)
        await asyncio.sleep(3)  # watches of every kind, and a resync, have had their turn
