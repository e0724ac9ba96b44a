"""What Kubernetes reports of a service's pods and its Deployment: what serves, what is starting, what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from llmservice_operator.api import labels
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.deployment import CONTAINER, HTTP, METRICS, METRICS_PORT, PORT
from llmservice_operator.children.volumes import FETCH_CONTAINER
from llmservice_operator.locations import ModelLocation
from llmservice_planner.addresses import endpoint

_IMAGE_REASONS = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MESSAGE_LIMIT = 1024
OOM_REMEDY = "raise resources.limits.memory and resources.requests.memory, or lower engine.maxModelLen"
_SIGNALLED = 128
"""An exit status above it is a signal's number and this."""
_SERVING_FAILED = 3
"""Exit status of a server whose engine failed after it was ready (`llmservice_server.http.server`)."""
_SENTENCE = "llmservice serve: "
"""Prefix of the server's last line when it refuses its arguments or model; a crash ends in a traceback instead."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps a pod from serving: a reason for machines and a sentence for users."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    ip: str | None
    created_s: float
    ready: bool
    terminating: bool
    restarts: int = 0
    scheduled_s: float | None = None
    """When it was bound to a node; None before."""
    ready_since_s: float | None = None
    trouble: Trouble | None = None
    deletion_cost: str | None = None
    model: str | None = None
    """The identity of the model that it was started with."""
    template: str | None = None
    """The hash of its pod template; None for a pod of an earlier operator version."""
    out_of_memory: bool = False
    """Whether it serves again after it was killed for memory."""
    fetching: bool = False
    """Whether its init container downloads the model now."""
    metrics_port: int = METRICS_PORT
    fetch_began_s: float | None = None
    """When its download of the model began."""
    server_began_s: float | None = None
    """When the server's container began, for the last time."""

    @property
    def serves(self) -> bool:
        return self.ready and not self.terminating and self.ip is not None

    @property
    def metrics_url(self) -> str:
        return f"http://{endpoint(self.ip or '', self.metrics_port)}/metrics"


def pods_of(manifests: Iterable[Manifest]) -> list[Pod]:
    """The pods without those that have finished, which a Deployment no longer counts."""
    live = (
        manifest for manifest in manifests if manifest.get("status", {}).get("phase") not in {"Succeeded", "Failed"}
    )
    return [pod_of(manifest) for manifest in live]


def pod_of(manifest: Manifest) -> Pod:
    metadata, status = manifest["metadata"], manifest.get("status", {})
    annotations = metadata.get("annotations") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    ready = conditions.get("Ready", {})
    return Pod(
        name=metadata["name"],
        uid=metadata.get("uid", metadata["name"]),
        ip=status.get("podIP") or None,
        created_s=epoch(metadata["creationTimestamp"]),
        ready=ready.get("status") == "True",
        terminating=bool(metadata.get("deletionTimestamp")),
        restarts=sum(int(one.get("restartCount", 0)) for one in status.get("containerStatuses") or []),
        scheduled_s=_since_s(conditions.get("PodScheduled", {})),
        ready_since_s=epoch(ready["lastTransitionTime"]) if ready.get("lastTransitionTime") else None,
        trouble=_trouble(status, conditions),
        fetching=any(
            one.get("name") == FETCH_CONTAINER and "running" in (one.get("state") or {})
            for one in status.get("initContainerStatuses") or []
        ),
        model=annotations.get(labels.MODEL),
        template=annotations.get(labels.TEMPLATE),
        out_of_memory=any(_was_out_of_memory(one) for one in status.get("containerStatuses") or []),
        deletion_cost=annotations.get(labels.DELETION_COST),
        metrics_port=_metrics_port(manifest),
        fetch_began_s=_began_s(status.get("initContainerStatuses"), FETCH_CONTAINER),
        server_began_s=_began_s(status.get("containerStatuses"), CONTAINER),
    )


def _since_s(condition: Mapping[str, Any]) -> float | None:
    """Since when a condition is True; None where it is not."""
    changed = condition.get("lastTransitionTime")
    return epoch(changed) if changed and condition.get("status") == "True" else None


def _began_s(containers: Iterable[Mapping[str, Any]] | None, name: str) -> float | None:
    for one in containers or ():
        state = one.get("state") or {}
        began = (state.get("running") or state.get("terminated") or {}).get("startedAt")
        if one.get("name") == name and began:
            return epoch(began)
    return None


def epoch(timestamp: str) -> float:
    """Seconds since 1970 of an RFC 3339 time."""
    return datetime.fromisoformat(timestamp).timestamp()


def _metrics_port(manifest: Manifest) -> int:
    """The server's port `metrics`; `http` for a pod of an earlier version, which serves /metrics there."""
    containers = (manifest.get("spec") or {}).get("containers") or []
    server = [port for one in containers if one.get("name") == CONTAINER for port in one.get("ports") or []]
    ports = {port.get("name"): int(port["containerPort"]) for port in server}
    return ports.get(METRICS) or ports.get(HTTP) or PORT


def _trouble(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> Trouble | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return Trouble("Unschedulable", str(scheduled.get("message") or "no node has room for the pod"))
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return next((trouble for one in containers if (trouble := _container_trouble(one))), None)


def _container_trouble(container: Mapping[str, Any]) -> Trouble | None:
    if container.get("ready"):
        return None
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message") or "")
    if reason in _IMAGE_REASONS:
        return Trouble("ImagePullBackOff", message or f"the image {container.get('image', '')} can't be pulled")
    if reason in _CONFIG_REASONS:
        return Trouble(reason, message or "the container can't be created")
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    if not ended.get("exitCode") and ended.get("reason") != "OOMKilled":
        return None
    return _ended_trouble(container, ended)


def _ended_trouble(container: Mapping[str, Any], ended: Mapping[str, Any]) -> Trouble:
    code = int(ended.get("exitCode") or 0)
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    said = lines[-1][:_MESSAGE_LIMIT] if lines else ""
    sentence = next((line for line in reversed(lines) if line.startswith(_SENTENCE)), None)
    if ended.get("reason") == "OOMKilled":
        return Trouble("OOMKilled", f"the {container.get('name')} container was killed for memory: {OOM_REMEDY}")
    if container.get("name") == FETCH_CONTAINER:
        return Trouble("ModelFetchFailed", said or f"the model's download ended with exit status {code}")
    if container.get("name") == CONTAINER and sentence is not None:
        reason = "EngineFailed" if code == _SERVING_FAILED else "ModelLoadFailed"
        return Trouble(reason, sentence.removeprefix(_SENTENCE)[:_MESSAGE_LIMIT])
    how = f"the {container.get('name')} container ended with exit status {code}"
    if code > _SIGNALLED:  # its last log line says nothing about that
        how = f"the {container.get('name')} container was killed by signal {code - _SIGNALLED} (exit {code})"
        return Trouble("Killed", f"{how}: see the pod's events and the node's log")
    return Trouble("CrashLoopBackOff", said or f"{how}: see the pod's log")


def _was_out_of_memory(container: Mapping[str, Any]) -> bool:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    return bool(container.get("ready")) and ended.get("reason") == "OOMKilled"


_QUOTA = ("exceeded quota", "must specify requests", "must specify limits")
_ADMISSION = ("admission webhook", "violates PodSecurity", "ValidatingAdmissionPolicy", "denied the request")


def denial_reason(message: str, otherwise: str) -> str:
    """QuotaExceeded, AdmissionDenied, or `otherwise`, from the API server's message about a refused object."""
    if any(words in message for words in _QUOTA):
        return "QuotaExceeded"
    if any(words in message for words in _ADMISSION):
        return "AdmissionDenied"
    return otherwise


def pods_denied(deployment: Manifest | None) -> Trouble | None:
    """What keeps Kubernetes from creating a Deployment's pods, as its ReplicaFailure condition reports it."""
    failure = _deployment_condition(deployment, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    message = str(failure.get("message") or "the pods can't be created")
    return Trouble(denial_reason(message, "FailedCreate"), message)


def rollout_overdue(deployment: Manifest | None) -> Trouble | None:
    progress = _deployment_condition(deployment, "Progressing")
    if progress.get("reason") != "ProgressDeadlineExceeded":
        return None
    return Trouble("ProgressDeadlineExceeded", str(progress.get("message") or "the rollout takes too long"))


def rollout_paused(deployment: Manifest | None) -> Trouble | None:
    """Kubernetes makes no pods of the present template, while it still scales those that are there."""
    if deployment is None or not deployment.get("spec", {}).get("paused"):
        return None
    status = deployment.get("status") or {}
    updated = status.get("updatedReplicas", 0)
    if updated and updated == status.get("replicas"):
        return None
    metadata = deployment["metadata"]
    return Trouble(
        "DeploymentPaused",
        "the Deployment's rollout is paused: kubectl rollout resume"
        f" deployment/{metadata['name']} -n {metadata['namespace']}",
    )


def image_volume_trouble(location: ModelLocation, deployment: Manifest | None) -> Trouble | None:
    """An API server without the feature drops the volume and its mounts silently, and the pods start without a model.

    `deployment` is as the API server keeps it; one of an earlier spec, which serves another path, says nothing.
    """
    if location.image is None or deployment is None:
        return None
    pod = deployment["spec"]["template"]["spec"]
    if not any(location.path in (container.get("args") or []) for container in pod["containers"]):
        return None
    if any(volume["name"] == "models" for volume in pod.get("volumes") or []):
        return None
    return Trouble(
        "ImageVolumesUnsupported",
        f"the API server dropped the volume of oci://{location.image}: image volumes need Kubernetes 1.31 or newer with"
        " the feature gate ImageVolume (on by default from 1.35) and a container runtime that mounts images; until then"
        " use hf://, s3:// or pvc://",
    )


def observed(deployment: Manifest | None) -> bool:
    """Whether Kubernetes has observed the Deployment's present generation."""
    if deployment is None:
        return False
    seen = (deployment.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= deployment["metadata"].get("generation", 0))


def counted_ready(deployment: Manifest | None) -> int:
    """The ready pods by the Deployment's own count.

    Pods of a deleted service have the labels, and often the template, of the next one of its name until they are gone.
    """
    return int(((deployment or {}).get("status") or {}).get("readyReplicas", 0))


def serving_present(deployment: Manifest | None, pods: Iterable[Pod]) -> int:
    """How many pods of the Deployment's present template serve."""
    template: dict[str, Any] = ((deployment or {}).get("spec") or {}).get("template") or {}
    present = ((template.get("metadata") or {}).get("annotations") or {}).get(labels.TEMPLATE)
    return min(counted_ready(deployment), sum(pod.serves and pod.template == present for pod in pods))


def _deployment_condition(deployment: Manifest | None, kind: str) -> Manifest:
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})
