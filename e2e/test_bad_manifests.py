"""What can't work is refused with the field's path, or becomes a condition that says what to do; no pod starts."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client import ApiException

from harness.cluster import Cluster
from harness.kube import Kube, tiny_service
from harness.wait import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "spec.autoscaling"),
        ({"replicas": 2, "autoscaling": {"minReplicas": 1, "maxReplicas": 2}}, "spec"),
        ({"model": {"uri": "ftp://example/model"}}, "spec.model"),
        ({"model": {}}, "spec.model.uri"),
        ({"engine": {"maxNumSeqs": 4096}}, "spec.engine.maxNumSeqs"),
        ({"engine": {"maxModelLen": "long"}}, "spec.engine.maxModelLen"),
        ({"slo": {"ttftP99": "fast"}}, "spec.slo.ttftP99"),
        ({"resources": {"gpu": {"count": 1}}}, "spec.resources"),
        ({"replicas": -1}, "spec.replicas"),
    ],
)
def test_the_api_refuses_it_and_names_the_field(kube: Kube, cluster: Cluster, spec: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiException) as refusal:
        kube.create(tiny_service("bad", cluster.model_uri, **spec))
    assert refusal.value.status == 422
    assert path in refusal.value.body


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("no-such-model", {"model": {"uri": "file:///no-such-model"}}, "no-such-model"),
        ("outside", {"model": {"uri": "file:///../etc"}}, "leaves the operator"),
        ("no-such-card", {"resources": {"gpu": {"count": 1, "product": "h1000"}}}, "h1000"),
        ("too-big", {"engine": {"maxModelLen": 2048}, "resources": {"requests": {"memory": "64Mi"}}}, "memory"),
        ("later", {"model": {"uri": "s3://bucket/model"}}, "s3://"),
    ],
)
def test_what_passes_the_schema_but_cannot_work_becomes_a_condition(
    kube: Kube, name: str, spec: dict[str, Any], words: str
) -> None:
    kube.create(tiny_service(name, "file:///tiny-llama", **spec))
    condition = kube.wait_condition(name, "SizingValid", "False")
    assert words in condition["message"]
    assert kube.condition(name, "Ready")["status"] == "False"
    assert kube.deployment(name) is None
    kube.delete(name)


def test_a_service_without_a_free_card_says_what_the_scheduler_said(kube: Kube, cluster: Cluster) -> None:
    if not cluster.is_local:
        pytest.skip("needs the local node's known number of cards")
    card = {"gpu": {"count": 1, "product": "l4"}, "requests": {"cpu": "100m", "memory": "512Mi"}}
    kube.create(tiny_service("crowd", cluster.model_uri, resources=card, replicas=5))

    def unschedulable() -> bool:
        return kube.condition("crowd", "Ready").get("reason") == "Unschedulable"

    wait_for(unschedulable, 60, lambda: kube.get("crowd")["status"])
    condition = kube.condition("crowd", "Ready")
    assert "Insufficient nvidia.com/gpu" in condition["message"]
    kube.delete("crowd")
