"""Whatever dies or hangs: no state is lost, nothing shrinks for want of figures, and service resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster import Cluster, processes, running_cluster
from harness.kube import Kube, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAME = "faults"
AUTOSCALING = {
    "minReplicas": 1,
    "maxReplicas": 2,
    "queueDepth": 2,
    "scaleUp": {"stabilization": "1s"},
    "scaleDown": {"stabilization": "4s"},
    "metrics": {"source": "prometheus", "window": "5s"},
}
BLIND_S = 15.0
"""Well beyond window and stabilisation: a service that shrinks for want of figures would have shrunk by then."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="kills processes, which only the local cluster can spare"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("faults")
    with running_cluster(directory, "--prometheus") as running:
        kube = Kube(running)
        kube.create(tiny_service(NAME, running.model_uri, autoscaling=AUTOSCALING))
        kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
        yield running


def component(cluster: Cluster, words: str) -> int:
    """The pid of one of the cluster's own processes, by what its command line says."""
    state = str(cluster.state_dir)

    def found() -> list[int]:
        return [pid for pid, command in processes() if words in command and (state in command or _environ(pid, state))]

    return wait_for(found, 30, lambda: [command for _, command in processes()])[-1]


def _environ(pid: int, state: str) -> bool:
    try:
        return state in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return False


def test_a_killed_operator_picks_up_where_it_was(cluster: Cluster, kube: Kube) -> None:
    before, leader = kube.get(NAME), kube.leader()
    os.kill(component(cluster, "llmservice_planner operator "), signal.SIGKILL)
    with traffic(cluster.gateway_url, NAME, rate=5, output_tokens=8) as meanwhile:  # until the Lease has expired
        wait_for(lambda: kube.leader() not in {"", leader}, 60, kube.leader)
    with traffic(cluster.gateway_url, NAME, rate=40, output_tokens=60) as load:
        wait_for(lambda: kube.get(NAME)["status"].get("readyReplicas", 0) == 2, 90, lambda: kube.get(NAME)["status"])
    assert meanwhile.failures == load.failures == []
    assert kube.get(NAME)["metadata"]["generation"] == before["metadata"]["generation"]


def test_a_hung_prometheus_never_shrinks_a_service(cluster: Cluster, kube: Kube) -> None:
    """The load is over, the replicas would go; without figures they stay, and the condition says why."""
    prometheus = component(cluster, "prometheus --config")
    with traffic(cluster.gateway_url, NAME, rate=40, output_tokens=60):
        wait_for(lambda: kube.get(NAME)["status"].get("readyReplicas", 0) == 2, 90, lambda: kube.get(NAME)["status"])
        os.kill(prometheus, signal.SIGSTOP)
    try:
        kube.wait_condition(NAME, "ScalingActive", "False", timeout_s=60)
        time.sleep(BLIND_S)  # nothing happens: that is what is waited for
        assert kube.get(NAME)["status"]["replicas"] == 2
    finally:
        os.kill(prometheus, signal.SIGCONT)
    wait_for(lambda: kube.get(NAME)["status"]["replicas"] == 1, 60, lambda: kube.get(NAME)["status"])


def test_requests_are_served_while_the_api_server_hangs(cluster: Cluster, kube: Kube) -> None:
    assert cluster.process is not None
    kube.wait_condition(NAME, "Ready", "True")
    before = kube.get(NAME)["status"]
    hung = [cluster.process.pid]  # the emulated API server and the node; pods, operator and gateway run on
    if "KUBEBUILDER_ASSETS" in os.environ:
        hung.append(component(cluster, "kube-apiserver --etcd"))
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    try:
        with traffic(cluster.gateway_url, NAME, rate=5, output_tokens=8) as load:
            time.sleep(12)  # longer than the operator's and the gateway's patience with one request
    finally:
        for pid in hung:
            os.kill(pid, signal.SIGCONT)
    assert load.failures == []
    assert len(load.records) > 20
    kube.wait_condition(NAME, "Ready", "True", timeout_s=60)
    assert kube.get(NAME)["status"]["replicas"] == before["replicas"]
