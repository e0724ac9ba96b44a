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
        ({"model": {"uri": "pvc://claim/a", "cache": {"claimName": "c"}}}, "spec.model"),
        ({"model": {"uri": "hf://org/a@v1", "revision": "v2"}}, "spec.model"),
        ({"model": {"uri": "s3://bucket/a", "s3": {"endpoint": "minio:9000"}}}, "spec.model.s3.endpoint"),
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
        ("no-image", {"model": {"uri": "oci://registry/model --privileged"}}, "is not oci://"),
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


def test_a_quota_that_has_no_room_is_told_with_its_figures(kube: Kube, cluster: Cluster) -> None:
    """The API server judges pods by the quota's status, which its controller would fill in."""
    hard = {"pods": "0"}
    kube.core.create_namespace({"metadata": {"name": "poor"}})
    quota = {"metadata": {"name": "no-pods"}, "spec": {"hard": hard}}
    kube.core.create_namespaced_resource_quota("poor", quota)
    if cluster.is_local:
        used = {"status": {"hard": hard, "used": {"pods": "0"}}}
        kube.core.patch_namespaced_resource_quota_status("no-pods", "poor", used)
    poor = Kube(cluster, "poor")
    poor.create(tiny_service("denied", cluster.model_uri))

    def exceeded() -> bool:
        return poor.condition("denied", "Ready").get("reason") == "QuotaExceeded"

    wait_for(exceeded, 60, lambda: poor.get("denied")["status"])
    assert "exceeded quota: no-pods" in poor.condition("denied", "Ready")["message"]
    kube.core.delete_namespaced_resource_quota("no-pods", "poor")
    poor.wait_condition("denied", "Ready", "True")
    poor.delete("denied")


def test_a_crash_loop_is_told_with_the_servers_last_line(kube: Kube, cluster: Cluster) -> None:
    broken = {"env": [{"name": "PYTHONPATH", "value": "/nowhere"}, {"name": "LLMSERVICE_HOST", "value": "203.0.113.9"}]}
    if not cluster.is_local:
        pytest.skip("the address that can't be bound to is the local node's way to make a server fail")
    kube.create(tiny_service("crashing", cluster.model_uri, podTemplate=broken))

    def crashing() -> bool:
        return kube.condition("crashing", "Ready").get("reason") in {"CrashLoopBackOff", "ModelLoadFailed"}

    wait_for(crashing, 90, lambda: (kube.get("crashing")["status"], kube.pods("crashing")))
    assert "203.0.113.9" in kube.condition("crashing", "Ready")["message"]
    kube.delete("crashing")
