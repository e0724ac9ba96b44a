"""The Deployment that a service should have: the sizing as the server's flags, probes, drain, restricted security."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from pydantic import BaseModel

from llmservice_operator.api import labels, units
from llmservice_operator.api.kinds import child_manifest
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.gateway_keys import gateway_key_args, gateway_key_mount, gateway_key_volume
from llmservice_operator.children.placement import expected_placement
from llmservice_operator.children.volumes import (
    CACHE_MOUNT,
    adapter_args,
    adapter_environment,
    adapter_mounts,
    adapter_volumes,
    fetch_container,
    kernel_args,
    kernel_mounts,
    model_mounts,
    model_volumes,
    scratch_environment,
    scratch_mounts,
    scratch_volumes,
    storage_request,
)
from llmservice_operator.correction import record_of
from llmservice_operator.sizing import Sized
from llmservice_planner.sizing.gpu import GPU

PORT = 8000
METRICS_PORT = 8001
HTTP, METRICS = "http", "metrics"
"""What the server's ports are called."""
CONTAINER = "server"
PRE_STOP_S = 5
"""A terminating pod still accepts requests for this long, until routers have removed it."""

_GRACE_MARGIN_S = 5
"""The grace period must be longer than preStop and drain together, else the kubelet kills a pod that still serves."""
_STARTUP_PERIOD_S = 2
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}


def expected_deployment(
    service: LLMService, sized: Sized, replicas: int, image: str, *, signed: bool = False
) -> Manifest:
    """The Deployment's owned fields; other clients may own the rest.

    `signed`: the pods take only requests that the gateway has signed.
    """
    rollout = service.spec.rollout
    template = _pod_template(service, sized, service.spec.pod_template.image or image)
    if signed:
        _add_gateway_keys(service, template["spec"])
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
    manifest = child_manifest(service, "Deployment")
    if (record := record_of(service.spec, sized)) is not None:
        manifest["metadata"]["annotations"] = {labels.SIZING: record}
    return manifest | {"spec": spec}


def template_of(deployment: Manifest | None) -> str | None:
    """The hash of its pod template; None without a Deployment, and for one of an earlier operator version."""
    template = (deployment or {}).get("spec", {}).get("template", {})
    annotations = template.get("metadata", {}).get("annotations") or {}
    return annotations.get(labels.TEMPLATE)


def _add_gateway_keys(service: LLMService, pod: Manifest) -> None:
    pod["volumes"].append(gateway_key_volume(service))
    server = pod["containers"][0]
    server["args"] = [*server["args"], *gateway_key_args(service)]
    server["volumeMounts"].append(gateway_key_mount())


def _hash(template: Manifest) -> str:
    """Distinguishes pods of this template from those of an earlier one."""
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
            "containers": [_server(service, sized, image), *template.sidecars],
            "volumes": [
                *scratch_volumes(service, sized),
                *model_volumes(service.spec.model, sized.model),
                *adapter_volumes(service),
                *template.volumes,
            ],
            **expected_placement(service, sized),
            **_filled(
                {
                    "initContainers": _init_containers(service, sized, image),
                    "resourceClaims": [_dumped(claim) for claim in template.resource_claims],
                    "imagePullSecrets": [_dumped(secret) for secret in template.image_pull_secrets],
                }
            ),
        },
    }


def server_args(service: LLMService, sized: Sized) -> list[str]:
    """The flags of `llmservice serve`."""
    engine, model = service.spec.engine, service.spec.model
    args = [
        "serve",
        *("--model", sized.model.location.path),
        *("--served-model-name", service.served_name),
        *("--port", str(PORT)),
        *("--metrics-port", str(METRICS_PORT)),
        *("--default-lane", service.spec.default_lane),
        *(("--batch-order", order) if (order := service.spec.lanes.batch_order) != "fcfs" else ()),
        *(("--config-overrides", model.overrides_json) if model.overrides_json else ()),
        *("--dtype", model.dtype),
        *(("--quantization", model.quantization) if model.quantization != "auto" else ()),
        *_sizing_args(service, sized),
        *("--block-size", str(engine.block_size)),
        *("--kv-cache-dtype", engine.kv_cache_dtype),
        *("--drain-timeout", str(_drain_s(service))),
        *(() if engine.prefix_caching else ("--no-prefix-caching",)),
        *(("--swap-space-gib", f"{engine.swap_space_gib:g}") if engine.swap_space_gib else ()),
        *adapter_args(service),
        *kernel_args(model),
    ]
    if isinstance(sized.device, GPU):
        return [*args, "--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    record = ("--start-record", f"{CACHE_MOUNT}/start.json")
    return [*args, *_cpu_memory_args(service, sized), *record, "--threads", str(_threads(service))]


def _sizing_args(service: LLMService, sized: Sized) -> list[str]:
    """The planner's numbers; for a model that only a pod can read, the spec's, and the server works out the rest."""
    engine = service.spec.engine
    max_model_len, step_tokens = engine.max_model_len, engine.max_num_batched_tokens
    max_num_seqs = None if engine.max_num_seqs == "auto" else engine.max_num_seqs
    if not sized.self_sized and sized.plan is not None:
        max_model_len, max_num_seqs = sized.plan.max_model_len, sized.plan.max_num_seqs
        step_tokens = sized.plan.max_num_batched_tokens
    numbers = {
        "--max-model-len": max_model_len,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": step_tokens,
        "--expected-tokens": engine.sizing.expected_tokens or sized.expected_tokens,
    }
    return [text for flag, number in numbers.items() if number is not None for text in (flag, str(number))]


def _cpu_memory_args(service: LLMService, sized: Sized) -> list[str]:
    """On a CPU the requested memory is the limit, however much the node has. An encoder has no KV cache."""
    if not sized.self_sized and sized.plan is not None and sized.plan.kv_pool_bytes:
        return ["--kv-cache-memory", str(sized.plan.kv_pool_bytes)]
    utilization = str(service.spec.engine.gpu_memory_utilization)
    memory = units.whole_bytes(service.spec.resources.requests.memory)
    return ["--memory-limit", str(memory), "--gpu-memory-utilization", utilization]


def _server(service: LLMService, sized: Sized, image: str) -> Manifest:
    template = service.spec.pod_template
    given = [_dumped(variable) for variable in template.env]
    names = {variable["name"] for variable in given}
    own = [*scratch_environment(), *adapter_environment(service, sized.model.location)]
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["llmservice"],
        "args": [*server_args(service, sized), *template.extra_args],
        "ports": [
            {"name": HTTP, "containerPort": PORT, "protocol": "TCP"},
            {"name": METRICS, "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "env": [*(one for one in own if one["name"] not in names), *given],
        **_filled({"envFrom": template.env_from}),
        "resources": _resources(service, sized),
        "startupProbe": _probe(
            "/ready", period_s=_STARTUP_PERIOD_S, failures=_budget(sized).load_s // _STARTUP_PERIOD_S
        ),
        "livenessProbe": _probe("/health", period_s=10, failures=6),
        "readinessProbe": _probe("/ready", period_s=2, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        # The server's last log line, which has the error, becomes the container's termination message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [
            *_mounts(service, sized, read_only=True),
            *adapter_mounts(service),
            *kernel_mounts(service.spec.model),
            *template.volume_mounts,
        ],
    }


def _dumped(part: BaseModel) -> Manifest:
    return part.model_dump(by_alias=True, exclude_none=True)


def _init_containers(service: LLMService, sized: Sized, image: str) -> list[Manifest]:
    """The download, where there is one; the model's Secret is given to this container alone."""
    given = [_dumped(variable) for variable in service.spec.pod_template.env]
    fetch = fetch_container(service.spec.model, sized.model, PORT, given)
    if fetch is None:
        return []
    requests = {**_requests(service), **storage_request(service.spec.model, sized.model)}
    container = {
        **fetch,
        "image": image,
        "env": [*scratch_environment(), *fetch["env"]],
        "resources": {"requests": requests, **_filled({"limits": _limits(service)})},
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": _mounts(service, sized, read_only=False),
    }
    return [container]


def _mounts(service: LLMService, sized: Sized, *, read_only: bool) -> list[Manifest]:
    return [*scratch_mounts(), *model_mounts(service.spec.model, sized.model, read_only=read_only)]


def _resources(service: LLMService, sized: Sized) -> Manifest:
    """GPUs are requested and limited alike: Kubernetes assigns whole ones, and exactly as many as are requested."""
    requests, limits = _requests(service), _limits(service)
    gpu = service.spec.resources.gpu
    if isinstance(sized.device, GPU) and gpu and gpu.resource_name != "":
        gpus = {gpu.resource_name or sized.device.resource_name: str(gpu.count)}
        requests, limits = requests | gpus, limits | gpus
    claims = [{"name": one.name} for one in service.spec.pod_template.resource_claims]
    return {"requests": requests, **_filled({"limits": limits, "claims": claims})}


def _requests(service: LLMService) -> Manifest:
    return service.spec.resources.requests.model_dump()


def _limits(service: LLMService) -> Manifest:
    return service.spec.resources.limits.model_dump(exclude_none=True)


def _threads(service: LLMService) -> int:
    """As many threads as cores that the pod may use; more would compete for them."""
    resources = service.spec.resources
    return max(1, math.ceil(units.amount(resources.limits.cpu or resources.requests.cpu)))


def _filled(fields: Manifest) -> Manifest:
    """Without empty values."""
    return {name: value for name, value in fields.items() if value}


def _budget(sized: Sized) -> StartupBudget:
    # Weights of unknown size may fill the memory. The figure must not change once the server reports them.
    most = sized.device.memory_bytes
    weights = most if sized.self_sized or sized.plan is None else sized.plan.weights_bytes
    return startup_budget(weights, downloads=sized.model.location.fetch_uri is not None)


def _drain_s(service: LLMService) -> int:
    return math.ceil(units.seconds(service.spec.drain_timeout))


def _probe(path: str, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": HTTP},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


READ_BYTES_PER_S = 200e6
"""A slow network volume; local NVMe reads ten times as fast."""

DOWNLOAD_BYTES_PER_S = 25e6
"""A hub over 200 Mbit/s."""

FIXED_S = 120
"""For any model: imports, the CUDA context, the profiling pass, captured graphs."""

SHORTEST_S = 600
_MARGIN = 2
_BEFORE_START_S = 900
"""Until the container starts: a new node, an image of several GiB."""


@dataclass(frozen=True, slots=True)
class StartupBudget:
    """Seconds after which a start has failed."""

    load_s: int
    """From the start of the server's container until it is ready; then the container is restarted."""

    progress_s: int
    """From a pod's creation until it is ready, download included; then the rollout has failed."""


def startup_budget(weights_bytes: float, *, downloads: bool) -> StartupBudget:
    """Twice the predicted time. The download runs in an init container, before the server's probes."""
    load_s = max(SHORTEST_S, math.ceil(_MARGIN * (FIXED_S + weights_bytes / READ_BYTES_PER_S)))
    download_s = math.ceil(_MARGIN * weights_bytes / DOWNLOAD_BYTES_PER_S) if downloads else 0
    return StartupBudget(load_s, load_s + download_s + _BEFORE_START_S)
