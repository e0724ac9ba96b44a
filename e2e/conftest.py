"""Fixtures of the end-to-end tests. Files that need no flags of their own share a local cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube
from harness.wait import wait_for

GPUS = 4
SHARE_A_CLUSTER = {
    f"e2e/test_{name}.py"
    for name in (
        "adapters",
        "admission",
        "bad_checkpoints",
        "chaos",
        "conditions",
        "kubectl",
        "manifest_to_tokens",
        "replicas",
    )
}
"""Files with the fixture `cluster` below. One worker runs all of them, because each worker starts a cluster."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with one unit of work for all files that share a cluster."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "e2e" if file in SHARE_A_CLUSTER else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    state_dir: Path = tmp_path_factory.mktemp("cluster")
    with running_cluster(state_dir, "--gpus", str(GPUS)) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Without a service of an earlier file."""
    yield shared_cluster
    if shared_cluster.is_local:
        kube = Kube(shared_cluster)
        for service in kube.services():
            kube.delete(service["metadata"]["name"])
        wait_for(
            lambda: not kube.services() and not shared_cluster.server_processes(),
            150,  # pods have their grace period on top of a start that they may be in the middle of
            lambda: [kube.services(), shared_cluster.server_processes()],
        )


@pytest.fixture
def kube(cluster: Cluster) -> Kube:
    return Kube(cluster)
