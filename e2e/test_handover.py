"""Two operators share a Lease: whichever ends, and however, the other goes on, and no request notices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAME = "handover"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="kills operators, which only the local cluster can spare"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("handover"), values={"operator": {"replicas": 2}}) as running:
        kube = Kube(running)
        kube.create(tiny_service(NAME, running.model_uri, replicas=1))
        kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
        yield running


def awaited_leader(cluster: Cluster, kube: Kube) -> str:
    """Who leads, once the other operator, which may just have been started again, stands by."""

    def found() -> str:
        leads = kube.leader()
        logs = (cluster.state_dir / "state" / "components").glob("operator*.log")
        stands_by = any(f"waiting: {leads} leads" in log.read_text(encoding="utf-8") for log in logs)
        return leads if leads and stands_by else ""

    return wait_for(found, 60, kube.leader)


@pytest.mark.parametrize(
    ("number", "limit_s", "change"),
    [(signal.SIGTERM, 5.0, "40s"), (signal.SIGKILL, 20.0, "50s")],
    ids=["stopped", "crashed"],
)
def test_the_other_operator_takes_over_and_no_request_fails(
    cluster: Cluster, kube: Kube, number: signal.Signals, limit_s: float, change: str
) -> None:
    first = awaited_leader(cluster, kube)
    with traffic(cluster.gateway_url, NAME, rate=20, output_tokens=8) as load:
        wait_for(lambda: len(load.records) >= 20, 60, lambda: load.failures)
        os.kill(int(first.split("_")[-2]), number)
        ended_s = time.monotonic()
        second = wait_for(lambda: (now := kube.leader()) not in {"", first} and now, 30)
        took_s = time.monotonic() - ended_s
        kube.patch(NAME, {"spec": {"drainTimeout": change}})

        def taken_up() -> bool:
            status = kube.get(NAME)["status"]
            ready = kube.condition(NAME, "Ready").get("status") == "True"
            return ready and status["observedGeneration"] == kube.get(NAME)["metadata"]["generation"]

        wait_for(taken_up, 60, lambda: kube.get(NAME)["status"])
    assert took_s < limit_s
    assert kube.leader() == second, "one takeover, and no more"
    assert load.failures == []
    assert len(load.records) >= 20
