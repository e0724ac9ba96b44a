"""The command against an API server: it reconciles, survives kill -9, and ends on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness.stores.model_hub import ModelHub
from harness.world.operator_process import (
    OperatorProcess,
    change_replicas,
    create_service,
    has_replicas,
    operator_processes,
    until,
)
from llmservice_local.api.registry import Registry
from llmservice_local.api.serve import serve_api
from llmservice_local.client import Endpoint
from llmservice_operator.api.crd import crd
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.cluster.kube_client import JSON, KubeClient
from llmservice_planner.command import main

pytestmark = pytest.mark.slow

DEPLOYMENT = CHILD_KINDS["Deployment"]
RBAC = "rbac.authorization.k8s.io/v1"

Start = Callable[..., Awaitable[OperatorProcess]]


@pytest.fixture
async def start(kubeconfig: Path, kube: KubeClient, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an operator without leader election."""
    assert kube
    async with operator_processes(tmp_path) as processes:
        yield lambda *flags: processes(kubeconfig, "--tick", "0.5", *flags)


async def test_the_operator_reconciles_also_after_it_was_killed(start: Start, kube: KubeClient) -> None:
    first = await start()
    await create_service(kube, replicas=2)
    await until(lambda: has_replicas(kube, 2))

    drift = {"spec": {"replicas": 9}}
    await kube.request("PATCH", DEPLOYMENT.path("team-a", "tiny"), body=drift)
    await until(lambda: has_replicas(kube, 2))

    first.process.kill()
    await first.ended()
    await change_replicas(kube, 3)
    successor = await start()
    await until(lambda: has_replicas(kube, 3))

    service = await kube.get_service("team-a", "tiny")
    assert service is not None
    assert "finalizers" not in service["metadata"]
    successor.process.send_signal(signal.SIGTERM)
    assert await successor.ended() == 0


@pytest.mark.parametrize("flags", [[], ["--share-hf-token"]])
async def test_the_operator_s_token_reads_no_tenant_s_model_by_default(
    flags: list[str], start: Start, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 2048}
    with ModelHub({"config.json": json.dumps(config).encode()}).serving() as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        await start("--hf-endpoint", hub.url, *flags)
        await create_service(kube, model={"uri": "hf://org/gated"}, engine={})

        async def reason() -> str | None:
            service = await kube.get_service("team-a", "tiny")
            conditions = (service or {}).get("status", {}).get("conditions", [])
            return next((one["reason"] for one in conditions if one["type"] == "SizingValid"), None)

        await until(reason)
        assert await reason() == ("Fits" if flags else "ModelForbidden")


async def test_the_operator_survives_an_outage_of_the_api_server(start: Start, kubeconfig: Path) -> None:
    registry, port = Registry(), 0
    async with serve_api(registry) as api:
        port = int(api.url.rpartition(":")[2])
        Endpoint(api.url).write_kubeconfig(kubeconfig)
        kube = await KubeClient.connect()
        await _prepare(kube)
        operator = await start()
        await create_service(kube, replicas=2)
        await until(lambda: has_replicas(kube, 2))
        await kube.close()
    await asyncio.sleep(5)  # the outage itself
    async with serve_api(registry, port=port):
        kube = await KubeClient.connect()
        await change_replicas(kube, 3)
        await until(lambda: has_replicas(kube, 3))
        drift = {"spec": {"replicas": 9}}
        await kube.request("PATCH", DEPLOYMENT.path("team-a", "tiny"), body=drift)
        await until(lambda: has_replicas(kube, 3))
        await kube.close()
        assert operator.process.returncode is None


async def test_other_namespaces_are_not_reconciled(start: Start, kube: KubeClient) -> None:
    await create_service(kube, "default")
    await start("--namespace", "team-a")
    await create_service(kube)

    await until(lambda: has_replicas(kube, 1))

    assert await kube.get_child(CHILD_KINDS["Deployment"], "default", "tiny") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_health_and_metrics_are_served(host: str, start: Start, kube: KubeClient) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    operator = await start("--host", host)
    operator.host = host
    await create_service(kube, replicas=2)
    await until(lambda: has_replicas(kube, 2))

    async def counted() -> bool:
        return 'llmservice_operator_desired_replicas{name="tiny",namespace="team-a"} 2.0' in await operator.metrics()

    await until(counted)
    assert json.loads(await operator.health()) == {"loops": "ok", "watches": "ok", "leader": True}


async def test_an_open_connection_of_a_scraper_does_not_delay_the_end(start: Start, kube: KubeClient) -> None:
    operator = await start()
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    port = int(operator.log.read_text().partition("metrics on port ")[2].partition(",")[0])

    async with aiohttp.ClientSession() as scraper:
        async with scraper.get(f"http://127.0.0.1:{port}/metrics") as response:
            await response.read()  # the connection is kept open
        operator.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(4):
            assert await operator.ended() == 0


async def test_missing_permissions_are_reported_until_they_are_granted(
    start: Start, kube: KubeClient, api_url: str, kubeconfig: Path
) -> None:
    accounts = "/api/v1/namespaces/team-a/serviceaccounts"
    await _create(kube, accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody"}})
    issued = await _create(kube, f"{accounts}/nobody/token", {"spec": {}})
    Endpoint(api_url, issued["status"]["token"]).write_kubeconfig(kubeconfig)
    await create_service(kube)
    operator = await start()

    async def failing() -> dict[str, str]:
        try:
            watches: dict[str, str] | str = json.loads(await operator.health())["watches"]
        except aiohttp.ClientConnectionError:
            return {}
        return watches if isinstance(watches, dict) else {}

    async def refused() -> bool:
        return {"llmservices", "pods", "deployments"} <= set(await failing())

    async def healthy() -> bool:
        return not await failing()

    await until(refused)
    assert "403" in (await failing())["pods"]
    assert 'llmservice_operator_watch_failing{resource="pods"} 1.0' in await operator.metrics()
    role = {"apiVersion": RBAC, "kind": "ClusterRoleBinding", "metadata": {"name": "everything"}}
    role |= {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "everything"}}
    subject = {"kind": "ServiceAccount", "name": "nobody", "namespace": "team-a"}
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    every = {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": {"name": "everything"}, "rules": [rule]}
    await _create(kube, f"/apis/{RBAC}/clusterroles", every)
    await _create(kube, f"/apis/{RBAC}/clusterrolebindings", {**role, "subjects": [subject]})

    await until(lambda: has_replicas(kube, 1))
    await until(healthy)
    assert operator.process.returncode is None


def test_a_tick_of_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "--tick", "0"]) == 2
    assert "--tick" in capsys.readouterr().err


def test_secrets_without_a_namespace_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "--usable-secrets", "hf-token"]) == 2
    assert "--usable-secrets is 'hf-token', expected NAMESPACE=NAME" in capsys.readouterr().err


def test_without_a_cluster_the_error_says_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))

    assert main(["operator", "--port", "0"]) == 2
    assert "Set KUBECONFIG" in capsys.readouterr().err


def test_public_keys_that_cannot_be_read_are_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kubeconfig: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert main(["operator", "--port", "0", "--gateway-public-keys", "absent"]) == 2
    sentence = "--gateway-public-keys: the gateway's public keys in absent cannot be read: No such file or directory"
    assert capsys.readouterr().err.splitlines()[-1] == f"llmservice operator: {sentence}"


async def _prepare(kube: KubeClient) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}}
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for path, body in ((definitions, crd()), ("/api/v1/namespaces", namespace)):
        await _create(kube, path, body)


async def _create(kube: KubeClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return await kube.request("POST", path, body=body, content_type=JSON)
