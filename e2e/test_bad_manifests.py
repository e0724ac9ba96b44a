"""What can't work is refused with the field's path, or becomes a condition that says what to do; no pod starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.client import ApiException

from harness.bad_manifests import BAD_NAMES, CONDITIONED, LITERAL, REFUSED
from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, tiny_service
from harness.wait import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without the webhook, which would deny what is to become a condition; test_admission.py is about it."""
    off = {"admission": {"enabled": False}}
    with running_cluster(tmp_path_factory.mktemp("bad"), "--gpus", "1", values=off) as running:
        yield running


@pytest.fixture(scope="module")
def neighbour(cluster: Cluster) -> str:
    """A good service beside all the bad ones."""
    kube = Kube(cluster)
    kube.create(tiny_service("neighbour", cluster.model_uri))
    kube.wait_condition("neighbour", "Ready", "True", timeout_s=90)
    return "neighbour"


def test_there_are_a_hundred_of_them() -> None:
    assert len(REFUSED) + len(BAD_NAMES) + len(CONDITIONED) + len(LITERAL) >= 100


@pytest.mark.parametrize("what", REFUSED)
def test_the_api_refuses_it_and_names_the_field(kube: Kube, cluster: Cluster, what: str) -> None:
    spec, path = REFUSED[what]
    with pytest.raises(ApiException) as refusal:
        kube.create(tiny_service("bad", cluster.model_uri, **spec))
    assert refusal.value.status == 422
    assert path in refusal.value.body


@pytest.mark.parametrize("what", BAD_NAMES)
def test_the_api_refuses_the_name(kube: Kube, cluster: Cluster, what: str) -> None:
    with pytest.raises(ApiException) as refusal:
        kube.create(tiny_service(BAD_NAMES[what], cluster.model_uri))
    assert refusal.value.status == 422
    assert "name" in refusal.value.body


@pytest.mark.parametrize("what", CONDITIONED)
def test_what_passes_the_schema_but_cannot_work_becomes_a_condition(
    kube: Kube, cluster: Cluster, neighbour: str, what: str
) -> None:
    spec, kind, words = CONDITIONED[what]
    if not cluster.is_local:
        pytest.skip("another cluster's webhook may deny it, and its operator knows a pvc:// model by a pod alone")
    kube.create(tiny_service("hopeless", cluster.model_uri, **spec))
    condition = kube.wait_condition("hopeless", kind, "False")
    assert words in condition["message"]
    assert kube.condition("hopeless", "Ready")["status"] == "False"
    assert kube.deployment("hopeless") is None
    kube.delete("hopeless")


@pytest.mark.parametrize("what", LITERAL)
def test_what_looks_dangerous_reaches_the_pod_as_text(kube: Kube, cluster: Cluster, what: str) -> None:
    """An argument vector, never a shell's line."""
    kube.create(tiny_service("literal", cluster.model_uri, replicas=0, **LITERAL[what]))
    deployment = wait_for(lambda: kube.deployment("literal"), 30)
    template = deployment["spec"]["template"]
    (server,) = template["spec"]["containers"]
    assert server["command"] == ["llmservice"]
    assert server["args"][0] == "serve"
    for variable in LITERAL[what]["podTemplate"].get("env", []):
        assert variable in server["env"]
    for key, value in LITERAL[what]["podTemplate"].get("annotations", {}).items():
        assert template["metadata"]["annotations"][key] == value
    kube.delete("literal")
    wait_for(lambda: kube.deployment("literal") is None, 60)
    assert not Path("/tmp/owned").exists()


def test_none_of_it_harmed_the_operator_or_the_neighbour(kube: Kube, cluster: Cluster, neighbour: str) -> None:
    kube.patch(neighbour, {"spec": {"podTemplate": {"annotations": {"still": "reconciled"}}}})

    def reconciled() -> bool:
        template = kube.deployment(neighbour)["spec"]["template"]  # type: ignore[index]
        return template["metadata"]["annotations"].get("still") == "reconciled"

    wait_for(reconciled, 30)
    if cluster.is_local:
        assert "starting it again" not in "".join(cluster.output)
        log = (cluster.state_dir / "state" / "components" / "operator.log").read_text()
        assert "Traceback" not in log
    kube.delete(neighbour)


def test_a_service_without_a_free_card_says_what_the_scheduler_said(kube: Kube, cluster: Cluster) -> None:
    if not cluster.is_local:
        pytest.skip("needs the local node's known number of GPUs")
    gpu = {"gpu": {"count": 1, "product": "l4"}, "requests": {"cpu": "100m", "memory": "512Mi"}}
    kube.create(tiny_service("crowd", cluster.model_uri, resources=gpu, replicas=2))

    def unschedulable() -> bool:
        return kube.condition("crowd", "Ready").get("reason") == "Unschedulable"

    wait_for(unschedulable, 60, lambda: kube.get("crowd")["status"])
    condition = kube.condition("crowd", "Ready")
    assert "Insufficient nvidia.com/gpu" in condition["message"]
    kube.delete("crowd")


def test_a_quota_that_has_no_room_is_told_with_its_figures(kube: Kube, cluster: Cluster) -> None:
    """The API server judges pods by the quota's status, which its controller would fill in."""
    if not cluster.is_local:
        pytest.skip("the claim with the model is in the namespace default, and the pods of this test in another")
    hard = {"pods": "0"}
    kube.core.create_namespace({"metadata": {"name": "poor"}})
    quota = {"metadata": {"name": "no-pods"}, "spec": {"hard": hard}}
    kube.core.create_namespaced_resource_quota("poor", quota)
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
    broken = {"env": [{"name": "LLMSERVICE_HOST", "value": "203.0.113.9"}]}
    if not cluster.is_local:
        pytest.skip("the address that can't be bound to is the local node's way to make a server fail")
    kube.create(tiny_service("crashing", cluster.model_uri, podTemplate=broken))

    def crashing() -> bool:
        return kube.condition("crashing", "Ready").get("reason") in {"CrashLoopBackOff", "ModelLoadFailed"}

    wait_for(crashing, 90, lambda: (kube.get("crashing")["status"], kube.pods("crashing")))
    assert "203.0.113.9" in kube.condition("crashing", "Ready")["message"]
    kube.delete("crashing")
