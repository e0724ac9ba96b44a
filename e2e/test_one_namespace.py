"""The operator without any right beyond one namespace: whole path there, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import NotFoundError, OpenAI

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, Object, is_ready, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAMESPACE = "team-a"
NAME = "here"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("namespace"), values={"namespaces": [NAMESPACE]}) as running:
        if not running.is_local:
            pytest.skip("what a cluster that is not ours follows is its owner's decision")
        yield running


@pytest.fixture
def kube(cluster: Cluster) -> Kube:
    return Kube(cluster, NAMESPACE)


def test_a_service_there_becomes_ready_answers_changes_and_goes(cluster: Cluster, kube: Kube) -> None:
    kube.create(tiny_service(NAME, cluster.model_uri, replicas=1))
    kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
    with traffic(cluster.gateway_url, NAME, rate=5, output_tokens=8) as load:
        kube.patch(NAME, {"spec": {"replicas": 2, "networkPolicy": {"enabled": False}}})

        def grown() -> list[Object]:
            pods = kube.pods(NAME)
            return pods if len(pods) == 2 and all(map(is_ready, pods)) else []

        wait_for(grown, 90, lambda: kube.pods(NAME))
        kube.patch(NAME, {"spec": {"replicas": 1}})
        wait_for(lambda: len(kube.pods(NAME)) == 1, 90, lambda: kube.pods(NAME))
    assert load.failures == []
    kube.delete(NAME)
    wait_for(lambda: kube.deployment(NAME) is None and not kube.pods(NAME), 90, lambda: kube.pods(NAME))


def test_a_service_elsewhere_is_left_alone(cluster: Cluster, kube: Kube) -> None:
    elsewhere = Kube(cluster)
    elsewhere.create(tiny_service("elsewhere", cluster.model_uri))
    kube.create(tiny_service("later", cluster.model_uri))
    kube.wait_condition("later", "Ready", "True", timeout_s=90)
    assert "status" not in elsewhere.get("elsewhere")
    assert elsewhere.deployment("elsewhere") is None
    client = OpenAI(base_url=f"{cluster.gateway_url}/v1", api_key="unused", max_retries=0)
    with client, pytest.raises(NotFoundError):
        client.completions.create(model="elsewhere", prompt="Hello", max_tokens=4)
