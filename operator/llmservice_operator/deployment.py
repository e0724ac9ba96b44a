"""The Deployment that a service should have: the sizing as the server's flags, probes, drain, restricted security."""

from __future__ import annotations

import math
from typing import Any

from llmservice_operator import duration, labels, quantity
from llmservice_operator.child import child_manifest
from llmservice_operator.model_source import MODELS_MOUNT
from llmservice_operator.placement import expected_placement
from llmservice_operator.resource import LLMService
from llmservice_operator.scratch import scratch_environment, scratch_mounts, scratch_volumes
from llmservice_operator.sizing import Sized
from llmservice_operator.spec import Manifest
from llmservice_operator.startup_budget import StartupBudget, startup_budget
from llmservice_planner.gpu import GPU

PORT = 8000
CONTAINER = "server"
PRE_STOP_S = 5
"""A terminating pod serves on for this long, so that routers drop it before it refuses anything."""

_GRACE_MARGIN_S = 5
"""Grace must be strictly longer than preStop and drain together, else the kubelet kills a pod that still answers."""
_STARTUP_PERIOD_S = 2
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}


def expected_deployment(service: LLMService, sized: Sized, replicas: int, image: str) -> Manifest:
    """The whole Deployment as owned fields; whatever it leaves out belongs to others."""
    rollout = service.spec.rollout
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": labels.selector_labels(service.name)},
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": _budget(sized).progress_s,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        "template": _pod_template(service, sized, image),
    }
    return child_manifest(service, "Deployment") | {"spec": spec}


def _pod_template(service: LLMService, sized: Sized, image: str) -> Manifest:
    template = service.spec.pod_template
    return {
        "metadata": {
            "labels": {**template.labels, **labels.child_labels(service.name)},
            "annotations": {**template.annotations, labels.SERVED_NAME: service.served_name},
        },
        "spec": {
            "serviceAccountName": service.name,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": PRE_STOP_S + _drain_s(service) + _GRACE_MARGIN_S,
            "securityContext": {
                "runAsNonRoot": True,
                "fsGroup": 65532,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_init_containers(service, sized, image),
            "containers": [_server(service, sized, image)],
            "volumes": [*scratch_volumes(service, sized), *_volumes(sized)],
            **expected_placement(service, sized),
            **_pull_secrets(service),
        },
    }


def server_args(service: LLMService, sized: Sized) -> list[str]:
    """The flags of `llmservice serve`."""
    engine, plan = service.spec.engine, sized.plan
    args = [
        "serve",
        *("--model", sized.model.location.path),
        *("--served-model-name", service.served_name),
        *("--port", str(PORT)),
        *("--dtype", service.spec.model.dtype),
        *("--max-model-len", str(plan.max_model_len)),
        *("--max-num-seqs", str(plan.max_num_seqs)),
        *("--max-num-batched-tokens", str(engine.max_num_batched_tokens)),
        *("--block-size", str(plan.block_size)),
        *("--kv-cache-dtype", engine.kv_cache_dtype),
        *("--drain-timeout", str(_drain_s(service))),
        *(() if engine.prefix_caching else ("--no-prefix-caching",)),
        *(("--swap-space-gib", f"{engine.swap_space_gib:g}") if engine.swap_space_gib else ()),
    ]
    if isinstance(sized.device, GPU):
        return [*args, "--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    return [*args, "--kv-cache-memory", str(plan.kv_pool_bytes), "--threads", str(_threads(service))]


def _server(service: LLMService, sized: Sized, image: str) -> Manifest:
    given = [variable.model_dump(by_alias=True, exclude_none=True) for variable in service.spec.pod_template.env]
    names = {variable["name"] for variable in given}
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["llmservice"],
        "args": server_args(service, sized),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "env": [*(one for one in scratch_environment() if one["name"] not in names), *given],
        "resources": _resources(service, sized),
        "startupProbe": _probe(
            "/ready", period_s=_STARTUP_PERIOD_S, failures=_budget(sized).load_s // _STARTUP_PERIOD_S
        ),
        "livenessProbe": _probe("/health", period_s=10, failures=6),
        "readinessProbe": _probe("/ready", period_s=2, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        # The server's last line says why it gave up; it comes back as the container's termination message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": _mounts(sized, read_only=True),
    }


def _init_containers(service: LLMService, sized: Sized, image: str) -> dict[str, Any]:
    """The download of an hf:// model; the token goes to this container and no other."""
    location = sized.model.location
    if location.fetch_uri is None:
        return {}
    fetch: Manifest = {
        "name": "fetch",
        "image": image,
        "command": ["llmservice"],
        "args": ["fetch", location.fetch_uri, location.path],
        "env": scratch_environment(),
        "resources": {"requests": _requests(service)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": _mounts(sized, read_only=False),
    }
    if secret := service.spec.model.secret_ref:
        source = {"secretKeyRef": {"name": secret.name, "key": "token"}}
        fetch["env"].append({"name": "HF_TOKEN", "valueFrom": source})
    return {"initContainers": [fetch]}


def _volumes(sized: Sized) -> list[Manifest]:
    location = sized.model.location
    volumes: list[Manifest] = []
    if location.kind == "hf":
        volumes.append({"name": "models", "emptyDir": {}})
    elif location.claim is not None:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": location.claim, "readOnly": True}})
    return volumes


def _mounts(sized: Sized, *, read_only: bool) -> list[Manifest]:
    mounts = scratch_mounts()
    if sized.model.location.kind != "file":
        mounts.append({"name": "models", "mountPath": MODELS_MOUNT, "readOnly": read_only})
    return mounts


def _resources(service: LLMService, sized: Sized) -> Manifest:
    """Cards are requested and limited alike: Kubernetes hands out whole ones, and never more than were asked for."""
    requests, limits = _requests(service), service.spec.resources.limits.model_dump(exclude_none=True)
    if isinstance(sized.device, GPU) and service.spec.resources.gpu:
        cards = {sized.device.resource_name: str(service.spec.resources.gpu.count)}
        requests, limits = requests | cards, limits | cards
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _requests(service: LLMService) -> Manifest:
    return service.spec.resources.requests.model_dump()


def _threads(service: LLMService) -> int:
    """As many threads as cores that the pod may count on; more would fight over them."""
    resources = service.spec.resources
    return max(1, math.ceil(quantity.amount(resources.limits.cpu or resources.requests.cpu)))


def _pull_secrets(service: LLMService) -> Manifest:
    secrets = [secret.model_dump() for secret in service.spec.pod_template.image_pull_secrets]
    return {"imagePullSecrets": secrets} if secrets else {}


def _budget(sized: Sized) -> StartupBudget:
    return startup_budget(sized.plan.weights_bytes, downloads=sized.model.location.fetch_uri is not None)


def _drain_s(service: LLMService) -> int:
    return math.ceil(duration.seconds(service.spec.drain_timeout))


def _probe(path: str, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
