"""Where a service's pods may run: on nodes with its card, past the card's taint, spread over the nodes."""

from __future__ import annotations

from typing import Any

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.sizing.sizing import Sized
from llmservice_planner.gpu import GPU

CARD_LABELS = frozenset(
    {
        "nvidia.com/gpu.product",
        "amd.com/gpu.product-name",
        "cloud.google.com/gke-accelerator",
        "k8s.amazonaws.com/accelerator",
        "karpenter.k8s.aws/instance-gpu-name",
        "accelerator",
        "node.kubernetes.io/instance-type",
    }
)
"""Node labels that settle which card a node has. A spec that selects on one of them chooses the nodes by itself."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def expected_placement(service: LLMService, sized: Sized) -> Manifest:
    """The scheduling fields of the pod: what the spec says, and what the card asks for beside it."""
    fields = service.spec.scheduling.model_dump(by_alias=True, exclude_none=True)
    fields["topologySpreadConstraints"] = fields["topologySpreadConstraints"] or [_spread(service)]
    if isinstance(sized.device, GPU):
        fields["tolerations"] = _tolerations(fields["tolerations"], sized.device)
        fields["affinity"] = _affinity(fields.get("affinity") or {}, fields["nodeSelector"], sized.device)
    return {name: value for name, value in fields.items() if value}


def _spread(service: LLMService) -> Manifest:
    """One node's end should take few replicas along; a pod that finds room nowhere else still runs."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels.selector_labels(service.name)},
        "matchLabelKeys": ["pod-template-hash"],
    }


def _tolerations(given: list[Manifest], card: GPU) -> list[Manifest]:
    """Nodes with cards are usually tainted with the resource's name, to keep others away."""
    ours = {"key": card.resource_name, "operator": "Exists", "effect": "NoSchedule"}
    return given if ours in given else [*given, ours]


def _affinity(given: Manifest, node_selector: dict[str, str], card: GPU) -> Manifest:
    """The given affinity with the card's product in every term: terms are alternatives, and each must ask for it."""
    node_affinity: dict[str, Any] = given.get("nodeAffinity") or {}
    terms = (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
    selected = set(node_selector) | {one.get("key") for term in terms for one in term.get("matchExpressions") or []}
    if selected & CARD_LABELS or not card.node_labels:
        return given
    product = {"key": card.label_key, "operator": "In", "values": list(card.node_labels)}
    required = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), product]} for term in terms or [{}]
    ]
    return {**given, "nodeAffinity": {**node_affinity, _REQUIRED: {"nodeSelectorTerms": required}}}
