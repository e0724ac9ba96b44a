"""The real command against an API server: it reconciles, survives kill -9, and ends on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness.model_hub import ModelHub
from llmservice_local.api.registry import Registry
from llmservice_local.api.serve import serve_api
from llmservice_local.endpoint import Endpoint
from llmservice_local.ports import free_port
from llmservice_operator.api.crd import crd
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_planner.command import main

SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC = {"model": {"uri": "hf://org/name", "shape": SHAPE}, "engine": {"maxModelLen": 512}, "replicas": 2}

RBAC = "rbac.authorization.k8s.io/v1"

MAIN = "import sys; from llmservice_planner.command import main; sys.exit(main())"

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start(kubeconfig: Path, kube: KubeClient) -> AsyncIterator[Start]:
    """Starts `llmservice operator`; what still runs at the end is killed."""
    started: list[asyncio.subprocess.Process] = []

    async def run(*more: str) -> asyncio.subprocess.Process:
        flags = ["--tick", "0.5", "--port", "0", "--host", "127.0.0.1", "--server-image", "img:1"]
        flags += ["--health-port", str(free_port())]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MAIN, "operator", *flags, *more, env=environment, stderr=asyncio.subprocess.PIPE
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(check: Callable[[], Awaitable[Any]]) -> Any:
    """Poll for what no event tells the test; bounded."""
    async with asyncio.timeout(30):
        while not (found := await check()):
            await asyncio.sleep(0.1)
        return found


async def replicas(kube: KubeClient) -> int | None:
    deployment = await kube.get_child(CHILD_KINDS["Deployment"], "team-a", "tiny")
    return None if deployment is None else int(deployment["spec"]["replicas"])


async def create_service(kube: KubeClient, namespace: str = "team-a") -> None:
    metadata = {"name": "tiny", "namespace": namespace}
    body = {"apiVersion": "serving.llmservice.io/v1alpha1", "kind": "LLMService", "metadata": metadata, "spec": SPEC}
    await _create(kube, SERVICES.replace("team-a", namespace), body)


async def test_the_command_keeps_a_service_as_it_should_be(start: Start, kube: KubeClient) -> None:
    process = await start()
    await create_service(kube)
    await until(lambda: _equals(kube, 2))

    drift = {"spec": {"replicas": 9}}
    await kube.request("PATCH", "/apis/apps/v1/namespaces/team-a/deployments/tiny", body=drift)
    await until(lambda: _equals(kube, 2))

    process.kill()
    await process.wait()
    await kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"replicas": 3}})
    successor = await start()
    await until(lambda: _equals(kube, 3))

    service = await kube.get_service("team-a", "tiny")
    assert service is not None
    assert "finalizers" not in service["metadata"]
    successor.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await successor.wait() == 0


@pytest.mark.parametrize("flags", [[], ["--share-hf-token"]])
async def test_the_operator_s_own_token_reads_no_tenant_s_model_unless_told_to(
    flags: list[str], start: Start, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 2048}
    with ModelHub({"config.json": json.dumps(config).encode()}).serving() as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        await start("--hf-endpoint", hub.url, *flags)
        body = {"apiVersion": "serving.llmservice.io/v1alpha1", "kind": "LLMService", "metadata": {"name": "tiny"}}
        await _create(kube, SERVICES, {**body, "spec": {"model": {"uri": "hf://org/gated"}}})

        async def sized() -> str | None:
            service = await kube.get_service("team-a", "tiny")
            conditions = (service or {}).get("status", {}).get("conditions", [])
            return next((one["reason"] for one in conditions if one["type"] == "SizingValid"), None)

        assert await until(sized) == ("Fits" if flags else "ModelForbidden")


async def test_an_api_server_that_goes_and_comes_back_finds_the_operator_waiting(
    start: Start, kubeconfig: Path
) -> None:
    registry, port = Registry(), 0
    async with serve_api(registry) as api:
        port = int(api.url.rpartition(":")[2])
        Endpoint(api.url).write_kubeconfig(kubeconfig)
        kube = await KubeClient.connect()
        await _prepare(kube)
        process = await start()
        await create_service(kube)
        await until(lambda: _equals(kube, 2))
        await kube.close()
    await asyncio.sleep(5)  # the outage itself
    async with serve_api(registry, port=port):
        kube = await KubeClient.connect()
        await kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"replicas": 3}})
        await until(lambda: _equals(kube, 3))
        drift = {"spec": {"replicas": 9}}
        await kube.request("PATCH", "/apis/apps/v1/namespaces/team-a/deployments/tiny", body=drift)
        await until(lambda: _equals(kube, 3))
        await kube.close()
        assert process.returncode is None


async def test_other_namespaces_than_those_named_are_left_alone(start: Start, kube: KubeClient) -> None:
    await create_service(kube, "default")
    await start("--namespace", "team-a")
    await create_service(kube)

    await until(lambda: _equals(kube, 2))

    assert await kube.get_child(CHILD_KINDS["Deployment"], "default", "tiny") is None


async def test_health_and_metrics_are_served(start: Start, kube: KubeClient) -> None:
    process = await start()
    port, health_port = await _ports(process)
    await create_service(kube)
    await until(lambda: _equals(kube, 2))

    async with aiohttp.ClientSession() as session:

        async def counted() -> bool:
            async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                return (
                    'llmservice_operator_desired_replicas{name="tiny",namespace="team-a"} 2.0' in await response.text()
                )

        await until(counted)
        async with session.get(f"http://127.0.0.1:{health_port}/healthz") as response:
            assert response.status == 200
            assert await response.json() == {"loops": "ok", "watches": "ok", "leader": True}


async def test_a_scraper_that_stays_connected_does_not_hold_up_the_end(start: Start, kube: KubeClient) -> None:
    process = await start()
    port, _ = await _ports(process)
    await create_service(kube)
    await until(lambda: _equals(kube, 2))

    async with aiohttp.ClientSession() as scraper:
        async with scraper.get(f"http://127.0.0.1:{port}/metrics") as response:
            await response.read()  # and the connection is kept for the next
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(4):
            assert await process.wait() == 0


async def test_an_account_that_may_not_look_is_reported_and_works_once_it_may(
    start: Start, kube: KubeClient, api_url: str, kubeconfig: Path
) -> None:
    accounts = "/api/v1/namespaces/team-a/serviceaccounts"
    await _create(kube, accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody"}})
    issued = await _create(kube, f"{accounts}/nobody/token", {"spec": {}})
    Endpoint(api_url, issued["status"]["token"]).write_kubeconfig(kubeconfig)
    await create_service(kube)
    process = await start()
    port, health_port = await _ports(process)

    async with aiohttp.ClientSession() as session:

        async def refused() -> bool:
            return {"llmservices", "pods", "deployments"} <= set(await _watches(session, health_port))

        await until(refused)
        assert "403" in (await _watches(session, health_port))["pods"]
        async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert 'llmservice_operator_watch_failing{resource="pods"} 1.0' in await response.text()
        role = {"apiVersion": RBAC, "kind": "ClusterRoleBinding", "metadata": {"name": "everything"}}
        role |= {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "everything"}}
        subject = {"kind": "ServiceAccount", "name": "nobody", "namespace": "team-a"}
        rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
        every = {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": {"name": "everything"}, "rules": [rule]}
        await _create(kube, f"/apis/{RBAC}/clusterroles", every)
        await _create(kube, f"/apis/{RBAC}/clusterrolebindings", {**role, "subjects": [subject]})

        await until(lambda: _equals(kube, 2))
        await until(lambda: _is_well(session, health_port))
    assert process.returncode is None


async def _watches(session: aiohttp.ClientSession, health_port: int) -> dict[str, str]:
    try:
        async with session.get(f"http://127.0.0.1:{health_port}/healthz") as response:
            assert response.status == 200
            watches: dict[str, str] | str = (await response.json())["watches"]
    except aiohttp.ClientConnectionError:
        return {}
    return watches if isinstance(watches, dict) else {}


async def _is_well(session: aiohttp.ClientSession, health_port: int) -> bool:
    return not await _watches(session, health_port)


def test_a_tick_that_would_spin_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "--tick", "0"]) == 2
    assert "--tick" in capsys.readouterr().err


def test_secrets_without_a_namespace_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "--usable-secrets", "hf-token"]) == 2
    assert "--usable-secrets is 'hf-token', expected NAMESPACE=NAME" in capsys.readouterr().err


def test_without_a_cluster_it_says_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))

    assert main(["operator", "--port", "0"]) == 2
    assert "Set KUBECONFIG" in capsys.readouterr().err


async def _prepare(kube: KubeClient) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}}
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for path, body in ((definitions, crd()), ("/api/v1/namespaces", namespace)):
        await _create(kube, path, body)


async def _create(kube: KubeClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return await kube.request("POST", path, body=body, content_type="application/json")


async def _equals(kube: KubeClient, wanted: int) -> bool:
    return await replicas(kube) == wanted


async def _ports(process: asyncio.subprocess.Process) -> tuple[int, int]:
    """Those of /metrics and /healthz, as the operator logs them."""
    assert process.stderr is not None
    lines: list[bytes] = []
    async with asyncio.timeout(20):
        async for line in process.stderr:
            lines.append(line)
            if match := re.search(rb"metrics on port (\d+), healthz on port (\d+)", line):
                return int(match[1]), int(match[2])
    raise AssertionError(f"the operator ended without naming its ports: {lines}")
