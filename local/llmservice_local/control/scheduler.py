"""Scheduling: assigns pods to nodes, and binds PersistentVolumeClaims to folders of the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from llmservice_local.client import CLAIMS, NODES, PODS
from llmservice_local.control.controller import Controller
from llmservice_local.objects import Object, condition_of, has_ended, requests_of, timestamp, with_condition
from llmservice_local.selector import matches_labels
from llmservice_operator.api.units import amount


class Scheduler(Controller):
    name = "default-scheduler"
    watches = (PODS, NODES, CLAIMS)

    async def reconcile(self) -> float | None:
        pending = [
            pod
            for pod in self.informer(PODS)
            if not pod["spec"].get("nodeName")
            and "deletionTimestamp" not in pod["metadata"]
            and pod["spec"].get("schedulerName", "default-scheduler") == self.name
            and not pod["spec"].get("schedulingGates")
        ]
        pending.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["creationTimestamp"]))
        for pod in pending:
            node, why = self._choose(pod)
            if node is None:
                await self._refuse(pod, why)
            else:
                await self._place(pod, node)
        return None

    def _choose(self, pod: Object) -> tuple[str | None, str]:
        """A node, or None and the reason; a pod with a missing claim fits on no node."""
        namespace = pod["metadata"]["namespace"]
        for name in claims_of(pod):
            if self.informer(CLAIMS).get(namespace, name) is None:
                return None, f"0/{len(list(self.informer(NODES)))} nodes are available: {claim_missing(name)}"
        return choose_node(pod, self.informer(NODES), self.informer(PODS))

    async def _place(self, pod: Object, node: str) -> None:
        await self.client.bind(pod, node)
        metadata = pod["metadata"]
        self.informer(PODS).observe(await self.client.get(PODS, metadata["namespace"], metadata["name"]))
        message = f"Successfully assigned {metadata['namespace']}/{metadata['name']} to {node}"
        await self.recorder.post(pod, "Normal", "Scheduled", message)

    async def _refuse(self, pod: Object, why: str) -> None:
        known = condition_of(pod, "PodScheduled")
        if known.get("status") == "False" and known.get("message") == why:
            return
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        status = with_condition(pod.get("status") or {}, refused, timestamp())
        patch: Object = {"status": {"conditions": status["conditions"]}}
        self.informer(PODS).observe(await self.client.merge(PODS, pod, patch, subresource="status"))
        await self.recorder.post(pod, "Warning", "FailedScheduling", why)


def claims_of(pod: Object) -> list[str]:
    """The PersistentVolumeClaims that a pod mounts."""
    volumes = pod["spec"].get("volumes") or []
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def claim_missing(name: str) -> str:
    """The message of the real scheduler."""
    return f'persistentvolumeclaim "{name}" not found. preemption: not helpful for scheduling.'


def choose_node(pod: Object, nodes: Iterable[Object], pods: Iterable[Object]) -> tuple[str | None, str]:
    """The node with the fewest pods that the pod fits on, or None and the real scheduler's message."""
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
    """Every reason why a pod does not fit on a node with these pods."""
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
    allocatable = {name: amount(value) for name, value in node["status"].get("allocatable", {}).items()}
    used: dict[str, Fraction] = {}
    for other in on_node:
        for name, quantity in requests_of(other).items():
            used[name] = used.get(name, Fraction(0)) + quantity
    insufficient = []
    for name, needed in requests_of(pod).items():
        if needed and needed + used.get(name, Fraction(0)) > allocatable.get(name, Fraction(0)):
            insufficient.append("Too many pods" if name == "pods" else f"Insufficient {name}")
    return insufficient


def _occupies(pod: Object, node: str) -> bool:
    """Whether a pod uses resources of the node: it does until it has ended, also while it is being deleted."""
    return pod["spec"].get("nodeName") == node and not has_ended(pod)


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
        matches_labels(term, labels) and matches_labels({"matchExpressions": term.get("matchFields")}, names)
        for term in affinity.get("nodeSelectorTerms") or []
    )


_PROTECTION = "kubernetes.io/pvc-protection"


class ClaimController(Controller):
    """Binds claims, and protects those that a pod mounts from deletion."""

    name = "persistentvolume-binder"
    watches = (CLAIMS, PODS)

    async def reconcile(self) -> float | None:
        for claim in self.informer(CLAIMS):
            if "deletionTimestamp" in claim["metadata"]:
                await self._release(claim)
            elif (claim.get("status") or {}).get("phase") != "Bound":
                await self._bind(claim)
        return None

    async def _bind(self, claim: Object) -> None:
        spec = claim["spec"]
        capacity = (spec.get("resources") or {}).get("requests") or {}
        status = {"phase": "Bound", "accessModes": spec.get("accessModes") or [], "capacity": capacity}
        self.informer(CLAIMS).observe(await self.client.merge(CLAIMS, claim, {"status": status}, subresource="status"))

    async def _release(self, claim: Object) -> None:
        """Remove the finalizer of a deleted claim that no pod mounts."""
        metadata = claim["metadata"]
        finalizers = metadata.get("finalizers") or []
        used = any(
            metadata["name"] in claims_of(pod)
            for pod in self.informer(PODS)
            if pod["metadata"]["namespace"] == metadata["namespace"]
        )
        if _PROTECTION in finalizers and not used:
            rest = [name for name in finalizers if name != _PROTECTION]
            await self.client.merge(CLAIMS, claim, {"metadata": {"finalizers": rest}})
