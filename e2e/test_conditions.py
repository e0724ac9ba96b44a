"""What the conditions say of a rollout that can't succeed, and of a server that is killed."""

from __future__ import annotations

import os
import signal

import pytest

from harness.cluster import Cluster
from harness.kube import Kube, Object, tiny_service
from harness.wait import wait_for

NAME = "conditions"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def ready(kube: Kube, *reasons: str) -> Object:
    """The condition Ready, once it has one of these reasons."""

    def found() -> Object | None:
        condition = kube.condition(NAME, "Ready")
        return condition if condition.get("reason") in reasons else None

    return wait_for(found, 90, lambda: (kube.get(NAME)["status"]["conditions"], kube.pods(NAME)))


def test_a_rollout_that_cannot_succeed_is_not_ready_and_says_why(cluster: Cluster, kube: Kube) -> None:
    kube.create(tiny_service(NAME, cluster.model_uri))
    kube.wait_condition(NAME, "Ready", "True", timeout_s=90)

    kube.patch(NAME, {"spec": {"podTemplate": {"extraArgs": ["--batch-share=9"]}}})

    broken = ready(kube, "ServingEarlierSpec")
    assert broken["status"] == "False"
    assert broken["observedGeneration"] == kube.get(NAME)["metadata"]["generation"]
    assert "0 of 1 replicas serve the present spec, 1 an earlier one" in broken["message"]
    assert "batch_share" in broken["message"] or "batch-share" in broken["message"]
    waited = cluster.kubectl("wait", "llm", NAME, "--for=condition=Ready", "--timeout=3s", check=False)
    assert waited.returncode == 1

    kube.patch(NAME, {"spec": {"podTemplate": {"extraArgs": None}}})
    ready(kube, "Serving")


def test_a_server_that_is_killed_is_named_so(cluster: Cluster, kube: Kube) -> None:
    if not cluster.is_local:
        pytest.skip("the server's process is on another machine")
    wait_for(lambda: len(kube.pods(NAME)) == 1, 60, lambda: kube.pods(NAME))  # the broken one may still end
    (name,) = {pod["metadata"]["name"] for pod in kube.pods(NAME)}
    for pid in cluster.server_processes():
        os.kill(pid, signal.SIGKILL)

    killed = ready(kube, "Killed")

    assert "the server container was killed by signal 9 (exit 137)" in killed["message"]
    ready(kube, "Serving")
    assert {pod["metadata"]["name"] for pod in kube.pods(NAME)} == {name}


def test_deliberate_zero_replicas_are_ready_and_not_stalled(cluster: Cluster, kube: Kube) -> None:
    kube.patch(NAME, {"spec": {"replicas": 0}})
    assert ready(kube, "NoReplicas")["status"] == "True"
    assert kube.condition(NAME, "Stalled")["status"] == "False"
    cluster.kubectl("delete", "llm", NAME, "--wait=true")
