"""A node is drained with kubectl: pods leave it as their budget allows, and come up on the other node."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmservice_local.client import DEPLOYMENTS, DISRUPTION_BUDGETS, NODES, PODS, connect
from llmservice_local.cluster import ClusterSettings, LocalCluster
from llmservice_local.objects import condition_of

KUBECTL = shutil.which("kubectl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on the PATH: this test drives it"),
]

REPLICAS = 3
LABELS = {"matchLabels": {"app": "web"}}
DEPLOYMENT: dict[str, Any] = {
    "metadata": {"name": "web"},
    "spec": {
        "replicas": REPLICAS,
        "selector": LABELS,
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "c", "image": "none", "command": ["sleep", "600"]}],
            },
        },
    },
}
BUDGET = {"metadata": {"name": "web"}, "spec": {"maxUnavailable": 1, "selector": LABELS}}


async def drain(cluster: LocalCluster, node: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        str(KUBECTL),
        *("drain", node, "--timeout=40s", "--ignore-daemonsets"),
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.settings.state_dir)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_a_drained_node_is_empty_and_never_more_than_one_pod_was_missing(tmp_path: Path) -> None:
    settings = ClusterSettings(state_dir=tmp_path, nodes=2, cpu="8", memory="8Gi", operator=False, gateway=False)
    async with LocalCluster(settings) as cluster, connect(cluster.endpoint, "test") as kube:
        await kube.create(DEPLOYMENTS, "default", DEPLOYMENT)
        await kube.create(DISRUPTION_BUDGETS, "default", BUDGET)
        least = REPLICAS

        async def ready() -> list[dict[str, Any]]:
            pods = (await kube.list(PODS, "default"))["items"]
            return [
                pod
                for pod in pods
                if condition_of(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]
            ]

        async def settled() -> list[dict[str, Any]]:
            while True:
                pods = await ready()
                budget = (await kube.get(DISRUPTION_BUDGETS, "default", "web")).get("status") or {}
                if len(pods) == REPLICAS and budget.get("disruptionsAllowed") == 1:
                    return pods
                await asyncio.sleep(0.05)

        async with asyncio.timeout(60):
            nodes = {pod["spec"]["nodeName"] for pod in await settled()}
            assert nodes == {"local-1", "local-2"}, "pods go to the node with fewer of them"
            draining = asyncio.create_task(drain(cluster, "local-1"))
            while not draining.done():
                least = min(least, len(await ready()))
                await asyncio.sleep(0.02)
            status, output = await draining
            assert status == 0, output
            assert "evicting pod default/web" in output
            assert {pod["spec"]["nodeName"] for pod in await settled()} == {"local-2"}
        assert least >= REPLICAS - 1
        assert (await kube.get(NODES, None, "local-1"))["spec"]["unschedulable"] is True
