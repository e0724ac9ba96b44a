"""kubectl against the emulated API and a running node. Without kubectl on the PATH, these tests alone are skipped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llmservice_local.cluster import ClusterSettings, LocalCluster

KUBECTL = shutil.which("kubectl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on the PATH: these tests drive it"),
]

SERVICE = """
apiVersion: serving.llmservice.io/v1alpha1
kind: LLMService
metadata: {name: tiny}
spec:
  model: {uri: "file:///tiny"}
  replicas: 1
"""
DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: c
          image: "web:1"
          command: [sh, -c, "echo hello from $WHO; sleep 60"]
          env: [{name: WHO, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
"""


class Kubectl:
    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._env = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(folder)}

    async def run(self, *arguments: str, stdin: str = "") -> tuple[int, str]:
        """The exit status, and what was written to both outputs."""
        process = await asyncio.create_subprocess_exec(
            str(KUBECTL),
            *arguments,
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(40):
            output, _ = await process.communicate(stdin.encode())
        return process.returncode or 0, output.decode()

    async def __call__(self, *arguments: str, stdin: str = "") -> str:
        status, output = await self.run(*arguments, stdin=stdin)
        assert status == 0, output
        return output


@pytest.fixture
async def kubectl(tmp_path: Path) -> AsyncIterator[Kubectl]:
    settings = ClusterSettings(state_dir=tmp_path, cpu="8", memory="8Gi", operator=False, gateway=False, assets=None)
    async with LocalCluster(settings) as cluster:
        yield Kubectl(cluster.kubeconfig, tmp_path)


async def test_service_is_applied_shown_changed_scaled_and_deleted(kubectl: Kubectl) -> None:
    assert await kubectl("apply", "-f", "-", stdin=SERVICE) == "llmservice.serving.llmservice.io/tiny created\n"
    assert (await kubectl("apply", "-f", "-", stdin=SERVICE)).endswith("tiny unchanged\n")
    assert (await kubectl("apply", "-f", "-", stdin=SERVICE.replace("replicas: 1", "replicas: 2"))).endswith(
        "configured\n"
    )
    header, row = (await kubectl("get", "llm")).splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "REPLICAS", "DESIRED", "MAXSEQS", "TTFT-P99", "AGE"]
    assert row.split()[:2] == ["tiny", "file:///tiny"]
    assert (await kubectl("scale", "llm/tiny", "--replicas=3")).endswith("scaled\n")
    assert await kubectl("get", "llm", "tiny", "-o", "jsonpath={.spec.replicas}") == "3"
    assert (await kubectl("apply", "--server-side", "-f", "-", "--force-conflicts", stdin=SERVICE)).endswith(
        "applied\n"
    )
    assert "file:///tiny" in await kubectl("describe", "llmservice", "tiny")
    assert (await kubectl("delete", "llm", "tiny")).endswith('"tiny" deleted\n')
    assert "No resources found" in await kubectl("get", "llm")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicas: 1", "replicas: -1", "spec.replicas: Invalid value: -1"),
        ("replicas: 1", "replicaz: 1", 'strict decoding error: unknown field "spec.replicaz"'),
        ("file:///tiny", "ftp://tiny", "spec.model: Invalid value"),
        ("replicas: 1", "autoscaling: {minReplicas: 3, maxReplicas: 2}", "minReplicas must not be above maxReplicas"),
    ],
)
async def test_bad_manifest_is_refused_with_the_fields_path(kubectl: Kubectl, old: str, new: str, message: str) -> None:
    status, output = await kubectl.run("apply", "-f", "-", stdin=SERVICE.replace(old, new))
    assert status == 1
    assert message in output


async def test_explain_shows_the_fields(kubectl: Kubectl) -> None:
    assert "-required-" in await kubectl("explain", "llm.spec.model")
    assert "maxReplicas" in await kubectl("explain", "llm.spec.autoscaling", "--recursive")
    assert "FIELD: replicas <integer>" in await kubectl("explain", "deployment.spec.replicas")


async def test_deployment_is_rolled_out_logged_described_and_deleted(kubectl: Kubectl) -> None:
    await kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    assert "successfully rolled out" in await kubectl("rollout", "status", "deployment/web", "--timeout=30s")
    assert "condition met" in await kubectl("wait", "--for=condition=Ready", "pod", "-l", "app=web", "--timeout=30s")
    name = await kubectl("get", "pods", "-o", "jsonpath={.items[0].metadata.name}")
    assert await kubectl("logs", name) == f"hello from {name}\n"
    row = (await kubectl("get", "pod", name, "-o", "wide")).splitlines()[1].split()
    assert row[1:4] == ["1/1", "Running", "0"]
    assert row[5].startswith("127.0.")
    assert "Started container c" in await kubectl("describe", "pod", name)
    assert "1/1" in await kubectl("get", "deploy,rs,nodes,events")
    await kubectl("rollout", "restart", "deployment/web")
    assert "successfully rolled out" in await kubectl("rollout", "status", "deployment/web", "--timeout=30s")
    assert "REVISION" in await kubectl("rollout", "history", "deployment/web")
    await kubectl("delete", "deployment", "web", "--cascade=foreground")
    assert "No resources found" in await kubectl("get", "pods")


async def test_logs_follow_a_pod_until_it_ends(kubectl: Kubectl) -> None:
    spec = {"containers": [{"name": "c", "image": "x", "command": ["sh", "-c", "echo a; sleep 1; echo b"]}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {**spec, "restartPolicy": "Never"}}
    await kubectl("apply", "-f", "-", stdin=json.dumps(body))
    await kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/p", "--timeout=30s")
    assert await kubectl("logs", "-f", "p") == "a\nb\n"
    assert await kubectl("logs", "p", "--tail=1") == "b\n"
    status, output = await kubectl.run("logs", "p", "-c", "other")
    assert status == 1
    assert "container other is not valid for pod p" in output


async def test_watch_prints_what_happens(kubectl: Kubectl) -> None:
    watching = asyncio.create_task(kubectl.run("get", "llm", "-w", "--request-timeout=3s"))
    await asyncio.sleep(0)
    await kubectl("apply", "-f", "-", stdin=SERVICE)
    await kubectl("delete", "llm", "tiny")
    _, output = await watching
    assert output.count("file:///tiny") == 2


async def test_namespaces_secrets_and_config_maps_can_be_created_from_flags(kubectl: Kubectl) -> None:
    assert await kubectl("create", "namespace", "team") == "namespace/team created\n"
    await kubectl("-n", "team", "create", "secret", "generic", "hf-token", "--from-literal=token=hush")
    await kubectl("-n", "team", "create", "configmap", "c", "--from-literal=a=1", "--from-literal=b=2")
    await kubectl("-n", "team", "create", "serviceaccount", "robot")
    assert await kubectl("-n", "team", "get", "secret", "hf-token", "-o", "jsonpath={.data.token}") == "aHVzaA=="
    assert await kubectl("-n", "team", "get", "cm", "c", "-o", "jsonpath={.data.a}{.data.b}") == "12"
    await kubectl("delete", "namespace", "team")
    status, _ = await kubectl.run("get", "namespace", "team")
    assert status == 1
