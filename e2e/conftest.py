"""Fixtures of the end-to-end tests. One local cluster serves a whole file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube

GPUS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    state_dir: Path = tmp_path_factory.mktemp("cluster")
    with running_cluster(state_dir, "--gpus", str(GPUS)) as running:
        yield running


@pytest.fixture
def kube(cluster: Cluster) -> Kube:
    return Kube(cluster)
