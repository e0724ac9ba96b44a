"""The Deployment that a service should have: the sizing as the server's flags, probes, drain, restricted security."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from llmservice_operator.api import duration, labels, quantity
from llmservice_operator.api.pod_spec import PodTemplate
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.child import child_manifest
from llmservice_operator.children.placement import expected_placement
from llmservice_operator.children.scratch import CACHE_MOUNT, scratch_environment, scratch_mounts, scratch_volumes
from llmservice_operator.children.startup_budget import StartupBudget, startup_budget
from llmservice_operator.models.delivery import fetch_container, model_mounts, model_volumes, storage_request
from llmservice_operator.sizing.sizing import Sized
from llmservice_planner.gpu import GPU

PORT = 8000
METRICS_PORT = 8001
HTTP, METRICS = "http", "metrics"
"""What the server's ports are called."""
CONTAINER = "server"
PRE_STOP_S = 5
"""A terminating pod serves on for this long, so that routers drop it before it refuses anything."""

_GRACE_MARGIN_S = 5
"""Grace must be strictly longer than preStop and drain together, else the kubelet kills a pod that still answers."""
_STARTUP_PERIOD_S = 2
_LONGEST = 16777216
"""As expected tokens: every sequence may become as long as the server allows, so that none is ever preempted."""
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}


def expected_deployment(service: LLMService, sized: Sized, replicas: int, image: str) -> Manifest:
    """The whole Deployment as owned fields; whatever it leaves out belongs to others."""
    rollout = service.spec.rollout
    template = _pod_template(service, sized, service.spec.pod_template.image or image)
    template["metadata"]["annotations"][labels.TEMPLATE] = _hash(template)
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": labels.selector_labels(service.name)},
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": _budget(sized).progress_s,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        "template": template,
    }
    return child_manifest(service, "Deployment") | {"spec": spec}


def _hash(template: Manifest) -> str:
    """Tells pods of this template from those of an earlier one."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _pod_template(service: LLMService, sized: Sized, image: str) -> Manifest:
    template = service.spec.pod_template
    return {
        "metadata": {
            "labels": {**template.labels, **labels.child_labels(service.name)},
            "annotations": {
                **template.annotations,
                labels.SERVED_NAME: service.served_name,
                labels.MODEL: service.spec.model.identity,
            },
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
            "containers": [_server(service, sized, image), *template.sidecars],
            "volumes": [
                *scratch_volumes(service, sized),
                *model_volumes(service.spec.model, sized.model),
                *template.volumes,
            ],
            **_resource_claims(template),
            **expected_placement(service, sized),
            **_pull_secrets(service),
        },
    }


def server_args(service: LLMService, sized: Sized) -> list[str]:
    """The flags of `llmservice serve`."""
    engine = service.spec.engine
    args = [
        "serve",
        *("--model", sized.model.location.path),
        *("--served-model-name", service.served_name),
        *("--port", str(PORT)),
        *("--metrics-port", str(METRICS_PORT)),
        *("--default-lane", service.spec.lanes.default),
        *("--dtype", service.spec.model.dtype),
        *_sizing_args(service, sized),
        *("--max-num-batched-tokens", str(engine.max_num_batched_tokens)),
        *("--block-size", str(engine.block_size)),
        *("--kv-cache-dtype", engine.kv_cache_dtype),
        *("--drain-timeout", str(_drain_s(service))),
        *(() if engine.prefix_caching else ("--no-prefix-caching",)),
        *(("--swap-space-gib", f"{engine.swap_space_gib:g}") if engine.swap_space_gib else ()),
    ]
    if isinstance(sized.device, GPU):
        return [*args, "--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    record = ("--start-record", f"{CACHE_MOUNT}/start.json")
    return [*args, *_cpu_memory_args(service, sized), *record, "--threads", str(_threads(service))]


def _sizing_args(service: LLMService, sized: Sized) -> list[str]:
    """The planner's numbers; where only a pod knows the model, the spec's, and the server works out the rest."""
    if not sized.self_sized and sized.plan is not None:
        plan = sized.plan
        return ["--max-model-len", str(plan.max_model_len), "--max-num-seqs", str(plan.max_num_seqs)]
    engine = service.spec.engine
    args = [] if engine.max_model_len is None else ["--max-model-len", str(engine.max_model_len)]
    if engine.max_num_seqs != "auto":
        return [*args, "--max-num-seqs", str(engine.max_num_seqs)]
    return [*args, "--expected-tokens", str(engine.sizing.expected_tokens or _LONGEST)]


def _cpu_memory_args(service: LLMService, sized: Sized) -> list[str]:
    """On a CPU the requested memory is what there is, however much more the node has."""
    if not sized.self_sized and sized.plan is not None:
        return ["--kv-cache-memory", str(sized.plan.kv_pool_bytes)]
    utilization = str(service.spec.engine.gpu_memory_utilization)
    memory = quantity.whole_bytes(service.spec.resources.requests.memory)
    return ["--memory-limit", str(memory), "--gpu-memory-utilization", utilization]


def _server(service: LLMService, sized: Sized, image: str) -> Manifest:
    given = _given_environment(service)
    names = {variable["name"] for variable in given}
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["llmservice"],
        "args": [*server_args(service, sized), *service.spec.pod_template.extra_args],
        "ports": [
            {"name": HTTP, "containerPort": PORT, "protocol": "TCP"},
            {"name": METRICS, "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "env": [*(one for one in scratch_environment() if one["name"] not in names), *given],
        **({"envFrom": service.spec.pod_template.env_from} if service.spec.pod_template.env_from else {}),
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
        "volumeMounts": [*_mounts(service, sized, read_only=True), *service.spec.pod_template.volume_mounts],
    }


def _given_environment(service: LLMService) -> list[Manifest]:
    return [variable.model_dump(by_alias=True, exclude_none=True) for variable in service.spec.pod_template.env]


def _init_containers(service: LLMService, sized: Sized, image: str) -> dict[str, Any]:
    """The download, where there is one; a Secret goes to this container and no other."""
    fetch = fetch_container(service.spec.model, sized.model, PORT, _given_environment(service))
    if fetch is None:
        return {}
    requests = {**_requests(service), **storage_request(service.spec.model, sized.model)}
    container = {
        **fetch,
        "image": image,
        "env": [*scratch_environment(), *fetch["env"]],
        "resources": {"requests": requests},
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": _mounts(service, sized, read_only=False),
    }
    return {"initContainers": [container]}


def _mounts(service: LLMService, sized: Sized, *, read_only: bool) -> list[Manifest]:
    return [*scratch_mounts(), *model_mounts(service.spec.model, sized.model, read_only=read_only)]


def _resources(service: LLMService, sized: Sized) -> Manifest:
    """Cards are requested and limited alike: Kubernetes hands out whole ones, and never more than were asked for."""
    requests, limits = _requests(service), service.spec.resources.limits.model_dump(exclude_none=True)
    if isinstance(sized.device, GPU) and service.spec.resources.gpu:
        cards = {sized.device.resource_name: str(service.spec.resources.gpu.count)}
        requests, limits = requests | cards, limits | cards
    claims = [{"name": one.name} for one in service.spec.pod_template.resource_claims]
    return {
        "requests": requests,
        **({"limits": limits} if limits else {}),
        **({"claims": claims} if claims else {}),
    }


def _requests(service: LLMService) -> Manifest:
    return service.spec.resources.requests.model_dump()


def _threads(service: LLMService) -> int:
    """As many threads as cores that the pod may count on; more would fight over them."""
    resources = service.spec.resources
    return max(1, math.ceil(quantity.amount(resources.limits.cpu or resources.requests.cpu)))


def _resource_claims(template: PodTemplate) -> Manifest:
    claims = [one.model_dump(by_alias=True, exclude_none=True) for one in template.resource_claims]
    return {"resourceClaims": claims} if claims else {}


def _pull_secrets(service: LLMService) -> Manifest:
    secrets = [secret.model_dump() for secret in service.spec.pod_template.image_pull_secrets]
    return {"imagePullSecrets": secrets} if secrets else {}


def _budget(sized: Sized) -> StartupBudget:
    # Weights that only the server knows may fill its memory. The figure must not change once it tells.
    most = sized.device.memory_bytes
    weights = most if sized.self_sized or sized.plan is None else sized.plan.weights_bytes
    return startup_budget(weights, downloads=sized.model.location.fetch_uri is not None)


def _drain_s(service: LLMService) -> int:
    return math.ceil(duration.seconds(service.spec.drain_timeout))


def _probe(path: str, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": HTTP},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
