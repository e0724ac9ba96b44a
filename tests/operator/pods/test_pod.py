from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.locations import ModelLocation
from llmservice_operator.pods.pod import Trouble, denial_reason, image_volume_trouble, pod_of, pods_denied, pods_of


def manifest(**status: Any) -> dict[str, Any]:
    metadata = {"name": "tiny-1", "uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "status": {"phase": "Running", "podIP": "10.0.0.1", **status}}


def ended(name: str = "server", **terminated: Any) -> dict[str, Any]:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    return {"name": name, "ready": False, "state": {"waiting": waiting}, "lastState": {"terminated": terminated}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {
        "name": "server",
        "ready": False,
        "image": "img:1",
        "state": {"waiting": {"reason": reason, "message": message}},
    }


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU"}


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        pytest.param({"conditions": [UNSCHEDULABLE]}, "Unschedulable", "0/1 nodes: no GPU", id="no room"),
        pytest.param({"containerStatuses": [waiting("ErrImagePull")]}, "ImagePullBackOff", "img:1", id="no image"),
        pytest.param(
            {"containerStatuses": [waiting("CreateContainerConfigError", 'secret "hf" not found')]},
            "CreateContainerConfigError",
            'secret "hf" not found',
            id="no secret",
        ),
        pytest.param(
            {"containerStatuses": [ended(exitCode=137, reason="OOMKilled")]}, "OOMKilled", "resources", id="no memory"
        ),
        pytest.param(
            {
                "containerStatuses": [
                    ended(exitCode=1, message='{"level":"info"}\nllmservice serve: shard 2 is missing\n')
                ]
            },
            "ModelLoadFailed",
            "shard 2 is missing",
            id="the server's own sentence",
        ),
        pytest.param(
            {"containerStatuses": [ended(exitCode=1, message="Traceback\nRuntimeError: boom")]},
            "CrashLoopBackOff",
            "RuntimeError: boom",
            id="a crash",
        ),
        pytest.param(
            {"containerStatuses": [ended(exitCode=139)]}, "Killed", "by signal 11 (exit 139)", id="a silent crash"
        ),
        pytest.param(
            {"containerStatuses": [ended(exitCode=137, message='{"message":"request","status":200}')]},
            "Killed",
            "the server container was killed by signal 9 (exit 137)",
            id="killed, and what it logged last is no reason",
        ),
        pytest.param(
            {"containerStatuses": [ended(exitCode=3, message="llmservice serve: the engine was killed by SIGKILL")]},
            "EngineFailed",
            "the engine was killed by SIGKILL",
            id="an engine that ended while it served",
        ),
        pytest.param(
            {"initContainerStatuses": [ended("fetch", exitCode=1, message="llmservice fetch: 401 from the hub")]},
            "ModelFetchFailed",
            "401 from the hub",
            id="no download",
        ),
    ],
)
def test_the_trouble_of_a_pod_has_a_reason_and_a_message(status: dict[str, Any], reason: str, message: str) -> None:
    trouble = pod_of(manifest(**status)).trouble

    assert trouble is not None
    assert trouble.reason == reason
    assert message in trouble.message


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"containerStatuses": [{"name": "server", "ready": True, "lastState": {"terminated": {"exitCode": 1}}}]},
        {"initContainerStatuses": [{"name": "fetch", "ready": True, "state": {"terminated": {"exitCode": 0}}}]},
        {"containerStatuses": [waiting("ContainerCreating")]},
    ],
)
def test_a_pod_that_starts_or_serves_is_in_no_trouble(status: dict[str, Any]) -> None:
    assert pod_of(manifest(**status)).trouble is None


def test_a_pod_that_serves_again_after_it_was_killed_for_memory_is_marked() -> None:
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}

    again = pod_of(manifest(containerStatuses=[{"name": "server", "ready": True, "lastState": killed}]))

    assert (again.trouble, again.out_of_memory) == (None, True)


def test_only_a_ready_pod_that_stays_serves() -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:30Z"}
    serving = manifest(conditions=[ready])
    leaving = manifest(conditions=[ready])
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"

    pod = pod_of(serving)
    assert pod.serves
    assert pod.ready_since_s is not None
    assert pod.ready_since_s - pod.created_s == 30
    assert not pod_of(leaving).serves


@pytest.mark.parametrize(("status", "after_s"), [("True", 20), ("False", None)])
def test_a_pod_is_scheduled_since_it_has_a_node(status: str, after_s: float | None) -> None:
    condition = {"type": "PodScheduled", "status": status, "lastTransitionTime": "2026-01-01T00:00:20Z"}

    pod = pod_of(manifest(conditions=[condition]))

    assert (pod.scheduled_s and pod.scheduled_s - pod.created_s) == after_s


def test_pods_that_ended_for_good_do_not_count() -> None:
    assert pods_of([manifest(phase="Failed"), manifest(phase="Succeeded")]) == []


OCI = ModelLocation("oci", "/models", image="ghcr.io/org/m:1")
VOLUME = {"name": "models", "image": {"reference": "ghcr.io/org/m:1"}}


def _deployment(model: str, volumes: list[dict[str, Any]]) -> dict[str, Any]:
    containers = [{"name": "server", "args": ["serve", "--model", model]}]
    return {"spec": {"template": {"spec": {"containers": containers, "volumes": volumes}}}}


@pytest.mark.parametrize(
    ("location", "deployment"),
    [
        (OCI, None),
        (OCI, _deployment("/models", [VOLUME])),
        (OCI, _deployment("/srv/earlier/model", [])),
        (ModelLocation("file", "/srv/models/tiny"), _deployment("/srv/models/tiny", [])),
    ],
)
def test_an_existing_or_unneeded_volume_is_no_trouble(location: ModelLocation, deployment: Any) -> None:
    assert image_volume_trouble(location, deployment) is None


def test_a_dropped_image_volume_is_reported_with_its_requirements() -> None:
    trouble = image_volume_trouble(OCI, _deployment("/models", [{"name": "tmp", "emptyDir": {}}]))
    assert trouble is not None
    assert trouble.reason == "ImageVolumesUnsupported"
    assert "oci://ghcr.io/org/m:1" in trouble.message
    assert "feature gate ImageVolume" in trouble.message


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1', "QuotaExceeded"),
        ('pods "x" is forbidden: failed quota: q: must specify requests.cpu', "QuotaExceeded"),
        ('admission webhook "policy.example" denied the request: no latest tag', "AdmissionDenied"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath', "AdmissionDenied"),
        ("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", "AdmissionDenied"),
        ('serviceaccount "x" not found', "FailedCreate"),
    ],
)
def test_a_denial_has_a_reason(said: str, reason: str) -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": said}

    assert denial_reason(said, "FailedCreate") == reason
    assert pods_denied({"status": {"conditions": [failure]}}) == Trouble(reason, said)


@pytest.mark.parametrize(
    "deployment",
    [None, {}, {"status": {}}, {"status": {"conditions": [{"type": "ReplicaFailure", "status": "False"}]}}],
)
def test_without_a_denial_there_is_no_trouble(deployment: dict[str, Any] | None) -> None:
    assert pods_denied(deployment) is None
