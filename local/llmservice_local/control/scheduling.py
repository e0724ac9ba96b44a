"""Which node a pod fits on, and, where it fits on none, the sentence in which the scheduler says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from llmservice_local.control.condition import condition_of
from llmservice_local.quantity import parse

Object = dict[str, Any]


def requests_of(pod: Object) -> dict[str, Fraction]:
    """What a pod needs at once: the sum over its containers, or the largest init container where that is more."""
    total: dict[str, Fraction] = {"pods": Fraction(1)}
    for container in pod["spec"].get("containers") or []:
        for name, quantity in _requests(container).items():
            total[name] = total.get(name, Fraction(0)) + quantity
    for container in pod["spec"].get("initContainers") or []:
        for name, quantity in _requests(container).items():
            total[name] = max(total.get(name, Fraction(0)), quantity)
    return total


def claims_of(pod: Object) -> list[str]:
    """The PersistentVolumeClaims that a pod mounts."""
    volumes = pod["spec"].get("volumes") or []
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def claim_missing(name: str) -> str:
    """As the real scheduler says it."""
    return f'persistentvolumeclaim "{name}" not found. preemption: not helpful for scheduling.'


def choose_node(pod: Object, nodes: Iterable[Object], pods: Iterable[Object]) -> tuple[str | None, str]:
    """The least loaded node that the pod fits on, or None and the reason, worded as the real scheduler's."""
    nodes, placed = list(nodes), list(pods)
    reasons: Counter[str] = Counter()
    fitting: list[tuple[int, str]] = []
    for node in nodes:
        name = node["metadata"]["name"]
        on_node = [other for other in placed if _occupies(other, name)]
        if why := misfits(pod, node, on_node):
            reasons.update(why)
        else:
            fitting.append((len(on_node), name))
    if fitting:
        return min(fitting)[1], ""
    if not nodes:
        return None, "no nodes available to schedule pods"
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    blocked = f"preemption: 0/{len(nodes)} nodes are available: "
    if any(not reason.startswith("Insufficient") for reason in reasons):
        blocked += f"{len(nodes)} Preemption is not helpful for scheduling."
    else:
        blocked += f"{len(nodes)} No preemption victims found for incoming pod."
    return None, f"0/{len(nodes)} nodes are available: {listed}. {blocked}"


def misfits(pod: Object, node: Object, on_node: Sequence[Object]) -> list[str]:
    """Every reason why a pod can't run on a node beside those that are there."""
    spec = node.get("spec") or {}
    if spec.get("unschedulable"):
        return ["node(s) were unschedulable"]
    if condition_of(node, "Ready").get("status") != "True":
        return ["node(s) had untolerated taint {node.kubernetes.io/not-ready: }"]
    for taint in spec.get("taints") or []:
        hard = taint["effect"] in {"NoSchedule", "NoExecute"}
        if hard and not any(_tolerates(toleration, taint) for toleration in pod["spec"].get("tolerations") or []):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
    if not _selected(pod, node):
        return ["node(s) didn't match Pod's node affinity/selector"]
    allocatable = {name: parse(value) for name, value in node["status"].get("allocatable", {}).items()}
    used: dict[str, Fraction] = {}
    for other in on_node:
        for name, quantity in requests_of(other).items():
            used[name] = used.get(name, Fraction(0)) + quantity
    insufficient = []
    for name, needed in requests_of(pod).items():
        if needed and needed + used.get(name, Fraction(0)) > allocatable.get(name, Fraction(0)):
            insufficient.append("Too many pods" if name == "pods" else f"Insufficient {name}")
    return insufficient


def _requests(container: Object) -> dict[str, Fraction]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse(quantity) for name, quantity in wanted.items()}


def _occupies(pod: Object, node: str) -> bool:
    """A pod holds its resources until it is gone, also while it is draining."""
    ended = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    return pod["spec"].get("nodeName") == node and not ended


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return not toleration.get("key") or toleration["key"] == taint["key"]
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))


def _selected(pod: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    if not (pod["spec"].get("nodeSelector") or {}).items() <= labels.items():
        return False
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not affinity:
        return True
    names = {"metadata.name": node["metadata"]["name"]}
    return any(
        all(_matches(expression, labels) for expression in term.get("matchExpressions") or [])
        and all(_matches(expression, names) for expression in term.get("matchFields") or [])
        for term in affinity.get("nodeSelectorTerms") or []
    )


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" if value is not None and value.isdigit():
            above = int(value) > int(values[0])
            return above if expression["operator"] == "Gt" else int(value) < int(values[0])
    return False
