"""A node is drained, and replicas go, while requests come in steadily: no user notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, is_ready, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAME = "steady"
RATE = 20.0
"""Requests a second: little enough for one replica on a slow core."""

WARM, LEAST = 50, 200
"""Requests that are answered before anything changes, and by the end."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("nodes"), "--nodes", "2") as running:
        if not running.is_local:
            pytest.skip("draining a node of a cluster that is not ours is its owner's decision")
        running_kube = Kube(running)
        running_kube.create(tiny_service(NAME, running.model_uri, replicas=2))
        wait_for(lambda: len(nodes_of(running_kube)) == 2, 90, lambda: running_kube.pods(NAME))
        yield running


def nodes_of(kube: Kube) -> list[str]:
    """The nodes of the service's pods; empty unless all are ready and none is going."""
    pods = kube.pods(NAME)
    settled = all(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)
    return [pod["spec"]["nodeName"] for pod in pods] if settled else []


@contextmanager
def steady_load(cluster: Cluster) -> Iterator[None]:
    """At least `LEAST` requests, of which some end before the block, and none fails."""
    with traffic(cluster.gateway_url, NAME, RATE, output_tokens=4) as load:
        wait_for(lambda: len(load.records) >= WARM, 60, lambda: load.failures)
        yield
        wait_for(lambda: len(load.records) >= LEAST, 120, lambda: len(load.records))
    assert load.failures == []
    assert len(load.records) >= LEAST


def test_draining_a_node_fails_no_request(cluster: Cluster, kube: Kube) -> None:
    assert set(nodes_of(kube)) == {"local-1", "local-2"}, "replicas are spread over the nodes"
    with steady_load(cluster):
        drained = cluster.kubectl("drain", "local-1", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=80s")
        assert "evicted" in drained.stdout
        wait_for(lambda: nodes_of(kube) == ["local-2"] * 2, 90, lambda: kube.pods(NAME))
    cluster.kubectl("uncordon", "local-1")


def test_scaling_down_fails_no_request(cluster: Cluster, kube: Kube) -> None:
    with steady_load(cluster):
        kube.patch(NAME, {"spec": {"replicas": 1}})
        wait_for(lambda: len(nodes_of(kube)) == 1, 90, lambda: kube.pods(NAME))
