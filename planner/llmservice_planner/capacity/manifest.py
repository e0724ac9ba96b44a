"""The LLMService manifest of a plan, ready for `kubectl apply`."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from llmservice_planner.capacity.plan import MOST_REPLICAS, Candidate, Targets
from llmservice_planner.sizing.gpu import GIB

API_VERSION = "serving.llmservice.io/v1alpha1"
_HOST_GIB = 8  # processes, tokenizer, pinned buffers, and the page cache of a shard
_MEMORY_STEP_GIB = 4


def manifest(
    candidate: Candidate,
    uri: str,
    targets: Targets,
    *,
    expected_tokens: int,
    min_replicas: int,
    workload: str | None = None,
) -> dict[str, Any]:
    """Of a candidate with one GPU per replica; `min_replicas` are those that the quietest times need."""
    sizing, request = candidate.sizing, candidate.request
    if sizing is None or not candidate.servable:
        raise ValueError(f"{candidate.gpu.name} has no plan that can be served: {candidate.problem}")
    figures = {
        "dtype": _unless(request.dtype, "auto"),
        "quantization": _unless(request.quantization, "auto"),
    }
    settings = {
        "maxModelLen": sizing.max_model_len,
        "maxNumSeqs": request.max_num_seqs,
        "maxNumBatchedTokens": request.max_num_batched_tokens and sizing.max_num_batched_tokens,
        "sizing": {"expectedTokens": expected_tokens},
        "blockSize": _unless(request.block_size, 16),
        "kvCacheDtype": _unless(request.kv_dtype, "auto"),
        "gpuMemoryUtilization": _unless(request.gpu_memory_utilization, 0.9),
        "maxLoras": _unless(request.max_loras, 0),
        "maxLoraRank": _unless(request.max_lora_rank, 16),
        "loraExperts": _unless(request.lora_experts, default=False),
    }
    most_replicas = min(candidate.replicas + 1, MOST_REPLICAS)
    slo = {"ttftP99": targets.ttft_p99_s, "itlP99": targets.itl_p99_s}
    spec: dict[str, Any] = {
        "model": {"uri": uri, **_given(figures)},
        "resources": {
            "gpu": {"product": candidate.gpu.name, "count": 1},
            "requests": {"cpu": "4", "memory": f"{_memory_gib(sizing.weights_bytes)}Gi"},
        },
        "engine": _given(settings),
        "slo": {key: duration(value) for key, value in slo.items() if value is not None},
        "autoscaling": {"minReplicas": min(min_replicas, candidate.replicas), "maxReplicas": most_replicas},
    }
    if not spec["slo"]:
        del spec["slo"]
    if workload is not None:
        spec = {"workload": workload, **spec}
    return {
        "apiVersion": API_VERSION,
        "kind": "LLMService",
        "metadata": {"name": service_name(uri)},
        "spec": spec,
    }


def to_yaml(document: Any) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=120).rstrip()


def service_name(uri: str) -> str:
    """A DNS label of the model's name; it starts with a letter, as that of a Service has to."""
    last = uri.partition("@")[0].partition("#")[0].rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}")[:40].strip("-")


def duration(seconds: float) -> str:
    """As the CRD writes it: 80ms, 2s."""
    return f"{seconds:g}s" if seconds >= 1 and seconds == round(seconds) else f"{round(seconds * 1e3, 3):g}ms"


def _unless(value: Any, default: Any) -> Any:
    return None if value == default else value


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _memory_gib(weights_bytes: int) -> int:
    return math.ceil((weights_bytes / GIB + _HOST_GIB) / _MEMORY_STEP_GIB) * _MEMORY_STEP_GIB
