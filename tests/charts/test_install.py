"""The chart installed, upgraded, rolled back and removed by Helm, in an API server that validates what it is given.

The API is the emulated one, and beside it the kube-apiserver that KUBEBUILDER_ASSETS names, where it does.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import helm_python as helm
import pytest
import yaml
from aiohttp import web

from harness.definitions import definition
from llmservice_gateway.access.keys import Policy, key_secret
from llmservice_local.api.serve import serve_api
from llmservice_local.client import (
    DEFINITIONS,
    DEPLOYMENTS,
    NAMESPACES,
    PODS,
    SECRETS,
    Endpoint,
    KubeClient,
    Resource,
    connect,
)
from llmservice_local.control_plane import serve_control_plane
from llmservice_local.errors import ApiError

CHART = Path(__file__).parents[2] / "charts" / "llmservice"
CRD = "llmservices.serving.llmservice.io"
LLMSERVICES = Resource("serving.llmservice.io/v1alpha1", "llmservices")
VALUES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "values").iterdir())
}
ASSETS = os.environ.get("KUBEBUILDER_ASSETS")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Cluster:
    """Helm, and a look at what it did."""

    def __init__(self, kube: KubeClient, kubeconfig: str) -> None:
        self.kube = kube
        self.helm = helm.Config(kubeconfig_content=kubeconfig, namespace="system")

    async def run(self, action: str, *arguments: Any, **options: Any) -> Any:
        """An action of Helm's, beside the event loop that answers it."""
        return await asyncio.to_thread(getattr(self.helm, action), *arguments, **options)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any] | None:
        try:
            return await self.kube.get(resource, namespace, name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def names(self, resource: Resource, namespace: str) -> set[str]:
        return {item["metadata"]["name"] for item in (await self.kube.list(resource, namespace))["items"]}

    async def until(self, seen: Callable[[], Awaitable[bool]]) -> None:
        """A real API server takes a moment until it serves a changed definition, or has removed one."""
        async with asyncio.timeout(30):
            while not await seen():
                await asyncio.sleep(0.1)

    async def accepts(self, manifest: dict[str, Any]) -> bool:
        """Whether the API would create such an LLMService, and knows every field of it."""
        probe = manifest | {"metadata": manifest["metadata"] | {"name": "probe"}}
        query = {"fieldValidation": "Strict", "dryRun": "All"}
        try:
            await self.kube.request("POST", LLMSERVICES.path("default"), probe, query=query)
        except ApiError as error:
            if error.code in {400, 404}:  # an unknown field, an unknown kind
                return False
            raise
        return True

    async def define(self, kind: str, group: str = "monitoring.coreos.com") -> None:
        """Make the API serve a kind of the Prometheus Operator's, or of another group, whatever its fields."""
        await self.kube.create(DEFINITIONS, None, definition(group, kind))

        async def served() -> bool:
            try:
                return bool(await self.kube.list(Resource(f"{group}/v1", f"{kind.lower()}s")))
            except ApiError as error:
                if error.code in {404, 429}:  # not yet, and "storage is (re)initializing"
                    return False
                raise

        await self.until(served)


@pytest.fixture(params=["emulated", "real"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        emulated = await stack.enter_async_context(serve_api())
        endpoint = Endpoint(emulated.url)
        if request.param == "real":
            if ASSETS is None:
                pytest.skip("KUBEBUILDER_ASSETS names no kube-apiserver")
            (tmp_path / "components").mkdir()
            session = await stack.enter_async_context(aiohttp.ClientSession())
            plane = serve_control_plane(Path(ASSETS), tmp_path, 0, session)
            front = _described_by(emulated.url, await stack.enter_async_context(plane))
            endpoint = await stack.enter_async_context(front)
        endpoint.write_kubeconfig(tmp_path / "kubeconfig")
        kube = await stack.enter_async_context(connect(endpoint, "test"))
        cluster = Cluster(kube, (tmp_path / "kubeconfig").read_text(encoding="utf-8"))
        stack.callback(cluster.helm.close)
        yield cluster


@pytest.fixture
def earlier_chart(tmp_path: Path) -> Path:
    """The chart before its CRD gained spec.monitoring."""
    path = tmp_path / "earlier"
    shutil.copytree(CHART, path)
    definition = path / "files" / f"{CRD}.yaml"
    crd = yaml.safe_load(definition.read_text(encoding="utf-8"))
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["monitoring"]
    definition.write_text(yaml.safe_dump(crd, sort_keys=False), encoding="utf-8")
    return path


async def test_services_live_through_install_upgrade_rollback_and_uninstall(
    cluster: Cluster, earlier_chart: Path
) -> None:
    release = await cluster.run("install", earlier_chart, "release", {}, create_namespace=True)
    assert release["status"] == "deployed"
    assert await cluster.names(DEPLOYMENTS, "system") == {"release-llmservice-operator", "release-llmservice-gateway"}
    plain = _in_the_notes(release["notes"])
    monitored = plain | {"spec": plain["spec"] | {"monitoring": {"podMonitor": True}}}
    await cluster.until(lambda: cluster.accepts(plain))
    assert not await cluster.accepts(monitored)
    service = await cluster.kube.create(LLMSERVICES, "default", plain)

    await cluster.run("upgrade", CHART, "release", {"gateway": {"replicas": 3}})
    gateway = await cluster.kube.get(DEPLOYMENTS, "system", "release-llmservice-gateway")
    assert gateway["spec"]["replicas"] == 3
    await cluster.until(lambda: cluster.accepts(monitored))

    await cluster.run("rollback", "release")
    gateway = await cluster.kube.get(DEPLOYMENTS, "system", "release-llmservice-gateway")
    assert gateway["spec"]["replicas"] == 2
    assert (await cluster.run("status", "release"))["status"] == "deployed"
    await cluster.until(lambda: _refused(cluster, monitored))

    await cluster.run("uninstall", "release")
    assert await cluster.names(DEPLOYMENTS, "system") == set()
    assert await cluster.names(SECRETS, "system") == set(), "what Helm remembered of the release"
    left = await cluster.kube.get(LLMSERVICES, "default", "qwen")
    assert left["metadata"]["uid"] == service["metadata"]["uid"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
async def test_api_takes_every_object(cluster: Cluster, values: dict[str, Any]) -> None:
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        await cluster.define(kind)
    await cluster.define("Certificate", "cert-manager.io")
    await cluster.define("HTTPRoute", "gateway.networking.k8s.io")
    for namespace in ("team-a", "team-b"):
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await cluster.kube.create(NAMESPACES, None, manifest)
    release = await cluster.run("install", CHART, "release", values, create_namespace=True)
    assert release["status"] == "deployed"


@pytest.mark.parametrize("cluster", ["real"], indirect=True)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
async def test_restricted_namespaces_take_every_pod(cluster: Cluster, values: dict[str, Any]) -> None:
    """The API server's own admission judges them, without creating any."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "system", "labels": labels}}
    await cluster.kube.create(NAMESPACES, None, manifest)
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(values, name="release", namespace="system")
    manifests = [one for path, text in rendered.items() if path.endswith(".yaml") for one in yaml.safe_load_all(text)]
    specs = [one["spec"]["template"]["spec"] for one in manifests if one and one["kind"] == "Deployment"]
    specs += [one["spec"] for one in manifests if one and one["kind"] == "Pod"]
    for spec in specs:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
        pod["spec"].pop("priorityClassName", None)  # only kube-system may use the example's
        await cluster.kube.request("POST", PODS.path("system"), pod, query={"dryRun": "All"})
    specs[0]["securityContext"]["runAsNonRoot"] = False
    with pytest.raises(ApiError, match="restricted"):
        await cluster.kube.request("POST", PODS.path("system"), pod | {"spec": specs[0]}, query={"dryRun": "All"})


async def test_a_part_that_is_turned_off_goes_with_the_upgrade(cluster: Cluster) -> None:
    await cluster.run("install", CHART, "release", {}, create_namespace=True)
    await cluster.run("upgrade", CHART, "release", {"gateway": {"enabled": False}})
    assert await cluster.names(DEPLOYMENTS, "system") == {"release-llmservice-operator"}


async def test_crd_goes_with_the_release_where_it_is_not_to_be_kept(cluster: Cluster) -> None:
    await cluster.run("install", CHART, "release", {"crds": {"keep": False}}, create_namespace=True)
    assert await cluster.get(DEFINITIONS, None, CRD)
    await cluster.run("uninstall", "release")

    async def gone() -> bool:
        return await cluster.get(DEFINITIONS, None, CRD) is None

    await cluster.until(gone)


async def test_bad_values_change_nothing(cluster: Cluster) -> None:
    with pytest.raises(helm.HelmError, match="replicas"):
        await cluster.run("install", CHART, "release", {"gateway": {"replicas": -1}}, create_namespace=True)
    assert await cluster.get(DEFINITIONS, None, CRD) is None


async def test_a_key_with_a_monthly_budget_is_refused_where_no_redis_counts_it(cluster: Cluster) -> None:
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "system"}}
    await cluster.kube.create(NAMESPACES, None, manifest)
    for name, monthly in (("chat", None), ("batch", 10**9)):
        secret = key_secret(name, "sk-llmservice-test", Policy(monthly_tokens=monthly), "system")
        await cluster.kube.create(SECRETS, "system", secret)
    complaint = r"API key batch .*set gateway\.keys\.redis\.secretName, or remove monthlyTokens"
    with pytest.raises(helm.HelmError, match=complaint):
        await cluster.run("install", CHART, "release", {"gateway": {"keys": {"enabled": True}}})
    counted = {"gateway": {"keys": {"enabled": True, "redis": {"secretName": "redis"}}}}
    assert (await cluster.run("install", CHART, "counted", counted))["status"] == "deployed"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_helm_test_runs_the_check_and_believes_its_pod(cluster: Cluster, phase: str) -> None:
    await cluster.run("install", CHART, "release", {}, create_namespace=True)
    testing = asyncio.create_task(cluster.run("test", "release", timeout=60))

    async def started() -> bool:
        return bool(await cluster.names(PODS, "system"))

    await cluster.until(started)
    (pod,) = (await cluster.kube.list(PODS, "system"))["items"]  # there is no node: the test plays the kubelet
    assert pod["spec"]["containers"][0]["args"][0] == "check"
    await cluster.kube.merge(PODS, pod, {"status": {"phase": phase}}, subresource="status")
    if phase == "Succeeded":
        await testing
    else:
        with pytest.raises(helm.HelmError, match=r"release-llmservice-test"):
            await testing


@asynccontextmanager
async def _described_by(description: str, endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    """The API behind a front that takes the answers about /openapi from another one.

    Some builds of kube-apiserver describe themselves in a way that Helm can't read, and it has no option not to ask.
    What it would check is checked by the API server itself.
    """

    async def forward(request: web.Request) -> web.StreamResponse:
        about = request.path.startswith("/openapi/")
        url, headers = (description, {}) if about else (endpoint.url, endpoint.headers())
        headers |= {name: value for name, value in request.headers.items() if name in {"Accept", "Content-Type"}}
        body = await request.read() or None
        async with session.request(request.method, url + request.path_qs, headers=headers, data=body) as got:
            answer = web.StreamResponse(status=got.status, headers={"Content-Type": got.headers["Content-Type"]})
            await answer.prepare(request)
            async for chunk in got.content.iter_any():
                await answer.write(chunk)
            return answer

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    connector = aiohttp.TCPConnector(ssl=endpoint.ssl_context())
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()


async def _refused(cluster: Cluster, manifest: dict[str, Any]) -> bool:
    return not await cluster.accepts(manifest)


def _in_the_notes(notes: str) -> dict[str, Any]:
    """The manifest that the notes tell the user to apply."""
    found = re.search(r"<<MANIFEST\n(.*?)\n *MANIFEST", notes, re.DOTALL)
    assert found
    manifest: dict[str, Any] = yaml.safe_load(found[1])
    return manifest
