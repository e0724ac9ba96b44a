from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from llmservice_local.client import Endpoint
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.cluster.kube_client import KubeClient, KubeError, load_configuration

CONFIG_MAPS = "/api/v1/namespaces/team-a/configmaps"
PODS = "/api/v1/pods"


@dataclass
class Watched:
    """One watch, as both ends saw it."""

    events: list[dict[str, Any]] = field(default_factory=list)
    error: KubeError | None = None
    asked: dict[str, str] = field(default_factory=dict)
    authorization: str | None = None
    calls: list[Any] = field(default_factory=list)
    """Method, path and status of each reported request."""


async def test_a_missing_object_is_none(kube: KubeClient) -> None:
    assert await kube.get_service("team-a", "absent") is None
    assert await kube.get_child(CHILD_KINDS["Deployment"], "team-a", "absent") is None


async def test_annotating_and_deleting_missing_objects_succeeds(kube: KubeClient) -> None:
    await kube.annotate_pod("team-a", "absent", {"a": "b"})
    await kube.delete_child(CHILD_KINDS["Service"], "team-a", "absent", uid="1")


async def test_an_error_has_the_api_servers_message_and_not_the_request(kube: KubeClient) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "UPPER"}, "data": {"token": "sesame"}}

    with pytest.raises(KubeError) as refused:
        await kube.request("POST", CONFIG_MAPS, body=body, content_type="application/json")

    assert refused.value.status == 422
    assert "metadata.name" in str(refused.value)
    assert "sesame" not in str(refused.value)


async def test_a_server_that_is_away_is_an_error_with_status_zero(kubeconfig: Path) -> None:
    Endpoint("http://127.0.0.1:9").write_kubeconfig(kubeconfig)
    client = await KubeClient.connect()

    with pytest.raises(KubeError, match="can't be reached") as refused:
        await client.get_service("team-a", "tiny")
    await client.close()

    assert refused.value.status == 0


async def test_many_requests_are_queued_and_the_lease_is_not(kubeconfig: Path) -> None:
    in_flight = most = 0
    let_go = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await let_go.wait()
        in_flight -= 1
        return web.json_response({})

    async def quick(_: web.Request) -> web.Response:
        return web.json_response({"quick": True})

    app = web.Application()
    app.add_routes([web.get("/slow", slow), web.get("/lease", quick)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}").write_kubeconfig(kubeconfig)
    client = await KubeClient.connect()
    flood = [asyncio.create_task(client.request("GET", "/slow")) for _ in range(64)]
    async with asyncio.timeout(10):
        while in_flight < 16:
            await asyncio.sleep(0.01)

        assert await client.request("GET", "/lease", urgent=True) == {"quick": True}
        let_go.set()
        await asyncio.gather(*flood)
    await client.close()
    await runner.cleanup()

    assert most == 16


@pytest.mark.parametrize(
    ("answer", "status", "reason", "retry_after_s"),
    [
        pytest.param({"status": 429, "headers": {"Retry-After": "7"}}, 429, "", 7.0, id="asks for a pause"),
        pytest.param({"status": 503, "headers": {"Retry-After": "3600"}}, 503, "", 120.0, id="for a long one"),
        pytest.param({"status": 429, "headers": {"Retry-After": "soon"}}, 429, "", 0.0, id="for no number"),
        pytest.param({"status": 500, "text": "[1]"}, 500, "", 0.0, id="an error that is no object"),
        pytest.param(
            {"status": 409, "text": '{"message": "no", "reason": "AlreadyExists"}'}, 409, "AlreadyExists", 0.0, id="why"
        ),
        pytest.param({"text": "<html>log in</html>"}, 0, "", 0.0, id="a page where an object was due"),
        pytest.param({"text": "[1]"}, 0, "", 0.0, id="a list where an object was due"),
        pytest.param({"text": "7"}, 0, "", 0.0, id="a number where an object was due"),
    ],
)
async def test_any_answer_is_an_object_or_an_error(
    answer: dict[str, Any], status: int, reason: str, retry_after_s: float, kubeconfig: Path
) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(**answer)

    app = web.Application()
    app.add_routes([web.get("/it", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}").write_kubeconfig(kubeconfig)
    client = await KubeClient.connect()

    with pytest.raises(KubeError) as failed:
        await client.request("GET", "/it")
    await client.close()
    await runner.cleanup()

    error = failed.value
    assert (error.status, error.reason, error.retry_after_s) == (status, reason, retry_after_s)


async def test_a_write_is_refused_once_the_fence_is_down_and_reads_are_not(kube: KubeClient) -> None:
    left_s = 1.0
    kube.may_write_s = lambda: left_s
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    assert await kube.request("POST", CONFIG_MAPS, body=body, content_type="application/json")

    left_s = 0.0
    with pytest.raises(KubeError, match="does not hold the lease"):
        await kube.request("DELETE", f"{CONFIG_MAPS}/a")

    assert (await kube.request("GET", f"{CONFIG_MAPS}/a"))["metadata"]["name"] == "a"


async def test_listed_objects_have_their_kind(kubeconfig: Path) -> None:
    """The kube-apiserver leaves that out of the items of built-in lists."""
    bare = {"metadata": {"name": "tiny", "namespace": "team-a"}}

    async def listed(_: web.Request) -> web.Response:
        answer = {"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": [bare]}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/api/v1/services", listed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}").write_kubeconfig(kubeconfig)
    client = await KubeClient.connect()

    objects, version = await client.list_all("/api/v1/services")
    await client.close()
    await runner.cleanup()

    assert (objects, version) == ([{"apiVersion": "v1", "kind": "Service", **bare}], "7")


async def test_credentials_of_a_netrc_are_not_sent(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({})

    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password sesame\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}").write_kubeconfig(kubeconfig)
    client = await KubeClient.connect()

    await client.get_service("team-a", "tiny")
    await client.close()
    await runner.cleanup()

    assert seen == [None]


@pytest.mark.parametrize(
    ("server", "environment", "proxy"),
    [
        ("https://cluster.example:6443", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://cluster.example:6443", {"HTTP_PROXY": "http://proxy:3128"}, None),
        ("https://cluster.example:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "cluster.example"}, None),
        ("https://cluster.example:6443", {}, None),
    ],
)
async def test_the_proxy_is_read_from_the_environment(
    server: str, environment: dict[str, str], proxy: str | None, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Endpoint(server).write_kubeconfig(kubeconfig)

    assert (await load_configuration()).proxy == proxy


async def test_a_pod_reaches_the_api_server_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenShift excepts the cluster by networks in NO_PROXY, as Go reads them."""

    def load(client_configuration: Any) -> None:
        client_configuration.host = "https://10.96.0.1:443"

    monkeypatch.setattr("kubernetes.aio.config.load_incluster_config", load)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,.svc")

    configuration = await load_configuration()

    assert (configuration.proxy, configuration.client_session_kwargs) == (None, {"trust_env": False})
