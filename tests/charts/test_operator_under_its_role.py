"""The operator as the chart installs it, with the chart's roles and no others, on an API server that enforces them.

Its pods go into a namespace that enforces the `restricted` Pod Security Standard.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import helm_python as helm
import pytest
import yaml

from llmservice_local.api.errors import ApiError
from llmservice_local.client import DEPLOYMENTS, EVENTS, NAMESPACES, PODS, KubeClient, Resource, connect
from llmservice_local.cluster import ClusterSettings, LocalCluster
from llmservice_operator.child import CHILD_KINDS
from llmservice_operator.resource import API_VERSION, PLURAL

ASSETS = os.environ.get("KUBEBUILDER_ASSETS")
pytestmark = pytest.mark.skipif(ASSETS is None, reason="only a real API server (KUBEBUILDER_ASSETS) enforces roles")

Object = dict[str, Any]
CHART = Path(__file__).parents[2] / "charts" / "llmservice"
RBAC = "rbac.authorization.k8s.io/v1"
INSTALLED = {
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "Role": Resource(RBAC, "roles"),
    "RoleBinding": Resource(RBAC, "rolebindings"),
    "ClusterRole": Resource(RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Resource(RBAC, "clusterrolebindings", namespaced=False),
}
SERVICES = Resource(API_VERSION, PLURAL)
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC: Object = {
    "model": {"uri": "hf://org/name", "shape": SHAPE},
    "resources": {"gpu": {"product": "l4"}},
    "engine": {"maxModelLen": 512},
    "replicas": 2,
}
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
WAIT_S = 40.0


@dataclass
class Installed:
    """A cluster with the chart's roles in it, and the operator's process."""

    kube: KubeClient
    process: asyncio.subprocess.Process
    log: Path

    async def metrics(self) -> str:
        (port,) = re.findall(r"metrics on port (\d+)", self.log.read_text())
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as response:
            return await response.text()


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not (found := await look()):
            await asyncio.sleep(0.1)
        return found


def rendered(values: Object) -> list[Object]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="release", namespace="system")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


@pytest.fixture(params=[{}, {"namespaces": ["team-a"]}], ids=["whole cluster", "one namespace"])
async def installed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Installed]:
    manifests = rendered(request.param)
    settings = ClusterSettings(state_dir=tmp_path, operator=False, gateway=False)
    async with LocalCluster(settings) as cluster, connect(cluster.endpoint, "test") as kube:
        await kube.create(NAMESPACES, None, {"metadata": {"name": "system"}})
        await kube.create(NAMESPACES, None, {"metadata": {"name": "team-a", "labels": RESTRICTED}})
        for manifest in manifests:
            if resource := INSTALLED.get(manifest["kind"]):
                await kube.create(resource, manifest["metadata"].get("namespace"), manifest)
        (deployment,) = [
            one for one in manifests if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("-operator")
        ]
        pod = deployment["spec"]["template"]["spec"]
        account = f"/api/v1/namespaces/system/serviceaccounts/{pod['serviceAccountName']}/token"
        request_ = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = (await kube.request("POST", account, request_))["status"]["token"]
        replace(cluster.endpoint, token=token).write_kubeconfig(tmp_path / "operators")
        flags = [flag for flag in pod["containers"][0]["args"] if not flag.startswith("--port")]
        log = tmp_path / "operator.log"
        with log.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "llmservice_planner", *flags, "--port=0", "--host=127.0.0.1"),
                env={**os.environ, "KUBECONFIG": str(tmp_path / "operators"), "POD_NAMESPACE": "system"},
                stderr=stderr,
            )
        try:
            yield Installed(kube, process, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


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
            assert await kube.get(Resource(kind.api_version, kind.plural), "team-a", "tiny")

    edit = {"spec": {"networkPolicy": {"enabled": False}, "drainTimeout": "30s"}}
    await kube.merge(SERVICES, created, edit)

    async def rolled() -> bool:
        deployment = await kube.get(DEPLOYMENTS, "team-a", "tiny")
        policies = await kube.list(Resource("networking.k8s.io/v1", "networkpolicies"), "team-a")
        grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return grace == 40 and not policies["items"]

    assert await until(rolled)

    async def told() -> bool:
        status = (await kube.get(SERVICES, "team-a", "tiny")).get("status") or {}
        events = (await kube.list(EVENTS, "team-a"))["items"]
        reported = any(event["involvedObject"]["kind"] == "LLMService" for event in events)
        return status.get("observedGeneration") == 2 and reported

    assert await until(told)
    refused = [line for line in (await installed.metrics()).splitlines() if 'code="403"' in line]
    assert refused == []
    assert "forbidden" not in installed.log.read_text().lower()


async def test_it_may_not_do_what_it_has_no_need_of(installed: Installed, tmp_path: Path) -> None:
    endpoint = yaml.safe_load((tmp_path / "operators").read_text())
    token = endpoint["users"][0]["user"]["token"]
    questions = [
        ("get", "", "secrets"),
        ("list", "", "configmaps"),
        ("delete", "", "pods"),
        ("create", "", "pods"),
        ("delete", "apps", "deployments"),
        ("patch", "serving.llmservice.io", "llmservices"),
        ("create", "rbac.authorization.k8s.io", "roles"),
    ]
    own = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    user = (await installed.kube.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", review))["status"]
    for verb, group, resource in questions:
        asked = {"namespace": "team-a", "verb": verb, "group": group, "resource": resource}
        spec = {"user": user["user"]["username"], "groups": user["user"]["groups"], "resourceAttributes": asked}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        answer = await installed.kube.request("POST", own, body)
        assert answer["status"]["allowed"] is False, (verb, resource)


async def test_the_namespace_really_refuses_other_pods(installed: Installed) -> None:
    bad = {"metadata": {"name": "bad"}, "spec": {"containers": [{"name": "c", "image": "i"}], "hostNetwork": True}}

    with pytest.raises(ApiError, match="violates PodSecurity"):
        await installed.kube.create(PODS, "team-a", bad)
