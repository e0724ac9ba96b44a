"""Who sets the number of replicas: the manifest, `kubectl scale` and an HPA, or the built-in autoscaler."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from harness.cluster import Cluster
from harness.kube import Kube, Object, tiny_service

NAME = "replicas"
SCALE = f"/apis/serving.llmservice.io/v1alpha1/namespaces/default/llmservices/{NAME}/scale"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture
def manifest(cluster: Cluster, kube: Kube) -> Iterator[Object]:
    """Neither replicas nor autoscaling, and pods that no node has room for: only their number is looked at."""
    too_large = {"gpu": {"count": 0}, "requests": {"cpu": "9000", "memory": "1Gi"}}
    yield tiny_service(NAME, cluster.model_uri, resources=too_large)
    cluster.kubectl("delete", "llm", NAME, "--wait=true")


def apply(cluster: Cluster, manifest: Object, *flags: str) -> None:
    cluster.kubectl("apply", "-f", "-", *flags, stdin=yaml.safe_dump(manifest))


def scale(cluster: Cluster) -> int:
    replicas: int = json.loads(cluster.kubectl("get", "--raw", SCALE).stdout)["spec"].get("replicas", 0)
    return replicas


def write_scale(cluster: Cluster, replicas: int) -> None:
    """As an HPA and KEDA do."""
    patch = json.dumps({"spec": {"replicas": replicas}})
    cluster.kubectl("patch", "llm", NAME, "--subresource=scale", "--type=merge", "-p", patch)


def test_the_scale_of_the_default_manifest_can_be_read_and_written(cluster: Cluster, manifest: Object) -> None:
    apply(cluster, manifest)
    assert scale(cluster) == 1
    write_scale(cluster, 2)
    assert scale(cluster) == 2
    cluster.kubectl("scale", "llm", NAME, "--replicas=0")
    assert scale(cluster) == 0


def test_what_an_hpa_wrote_outlives_a_server_side_apply_that_does_not_name_it(
    cluster: Cluster, manifest: Object
) -> None:
    apply(cluster, manifest, "--server-side")
    write_scale(cluster, 4)

    manifest["spec"]["drainTimeout"] = "61s"
    apply(cluster, manifest, "--server-side")

    assert scale(cluster) == 4


def test_autoscaling_comes_and_goes_and_leaves_the_default(cluster: Cluster, kube: Kube, manifest: Object) -> None:
    autoscaled = {**manifest, "spec": {**manifest["spec"], "autoscaling": {"maxReplicas": 2}}}
    apply(cluster, manifest)
    apply(cluster, autoscaled)
    refused = cluster.kubectl("scale", "llm", NAME, "--replicas=2", check=False)
    assert refused.returncode == 1
    assert "replicas is ignored where autoscaling is set" in refused.stderr
    assert scale(cluster) == 1

    apply(cluster, manifest)

    assert "autoscaling" not in kube.get(NAME)["spec"]
    cluster.kubectl("scale", "llm", NAME, "--replicas=2")
    assert scale(cluster) == 2


def test_autoscaling_is_added_to_what_was_scaled(cluster: Cluster, manifest: Object) -> None:
    """The number of another manager stays in the spec, where a manifest without replicas can't remove it."""
    apply(cluster, manifest, "--server-side")
    write_scale(cluster, 3)

    manifest["spec"]["autoscaling"] = {"maxReplicas": 3}
    apply(cluster, manifest, "--server-side")

    assert scale(cluster) == 3
    refused = cluster.kubectl("scale", "llm", NAME, "--replicas=2", check=False)
    assert "replicas is ignored where autoscaling is set" in refused.stderr
