"""Where a service's pods may run: on nodes with its GPU, tolerating the GPU's taint, spread over the nodes."""

from __future__ import annotations

from typing import Any

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.sizing import Sized
from llmservice_planner.sizing.gpu import GPU

GPU_LABELS = frozenset(
    {
        "nvidia.com/gpu.product",
        "amd.com/gpu.product-name",
        "cloud.google.com/gke-accelerator",
        "k8s.amazonaws.com/accelerator",
        "karpenter.k8s.aws/instance-gpu-name",
        "eks.amazonaws.com/instance-gpu-name",
        "karpenter.azure.com/sku-gpu-name",
        "accelerator",
        "node.kubernetes.io/instance-type",
    }
)
"""Node labels that determine a node's GPU. A spec that selects on one of them chooses the nodes by itself."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def expected_placement(service: LLMService, sized: Sized) -> Manifest:
    """The scheduling fields of the pod: those of the spec, and those that its GPU needs."""
    fields = service.spec.scheduling.model_dump(by_alias=True, exclude_none=True)
    fields["topologySpreadConstraints"] = fields["topologySpreadConstraints"] or [_spread(service)]
    if isinstance(sized.device, GPU):
        fields["tolerations"] = _tolerations(fields["tolerations"], sized.device)
        if service.spec.resources.gpu is None or service.spec.resources.gpu.resource_name != "":  # else the claim's
            fields["affinity"] = _affinity(fields.get("affinity") or {}, fields["nodeSelector"], sized.device)
    return {name: value for name, value in fields.items() if value}


def _spread(service: LLMService) -> Manifest:
    """The loss of one node should cost few replicas; a pod that fits nowhere else still runs."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels.selector_labels(service.name)},
        "matchLabelKeys": ["pod-template-hash"],
    }


def _tolerations(given: list[Manifest], gpu: GPU) -> list[Manifest]:
    """GPU nodes are usually tainted with the resource's name, to keep other pods away."""
    ours = {"key": gpu.resource_name, "operator": "Exists", "effect": "NoSchedule"}
    return given if ours in given else [*given, ours]


def _affinity(given: Manifest, node_selector: dict[str, str], gpu: GPU) -> Manifest:
    """The given affinity with the GPU's product in every term: terms are alternatives, and each must require it."""
    node_affinity: dict[str, Any] = given.get("nodeAffinity") or {}
    terms = (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
    selected = set(node_selector) | {one.get("key") for term in terms for one in term.get("matchExpressions") or []}
    if selected & GPU_LABELS or not gpu.node_labels:
        return given
    product = {"key": gpu.label_key, "operator": "In", "values": list(gpu.node_labels)}
    required = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), product]} for term in terms or [{}]
    ]
    return {**given, "nodeAffinity": {**node_affinity, _REQUIRED: {"nodeSelectorTerms": required}}}
