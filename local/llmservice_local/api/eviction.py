"""`POST pods/NAME/eviction`, which `kubectl drain` sends: a deletion that a PodDisruptionBudget may refuse.

The rules are those of k8s.io/kubernetes/pkg/registry/core/pod/storage/eviction.go.
"""

from __future__ import annotations

from typing import Any

from llmservice_local.api.registry import Registry, WriteOptions
from llmservice_local.api.request import delete_options
from llmservice_local.errors import ApiError, bad_request
from llmservice_local.objects import Object, has_ended, is_ready
from llmservice_local.selector import matches_labels

_REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."


def evict(registry: Registry, namespace: str, name: str, eviction: Any) -> None:
    """Delete the pod if its budget allows it; raises `ApiError` 429 otherwise."""
    if not isinstance(eviction, dict):
        raise bad_request(f"an Eviction is an object, not {type(eviction).__name__}")
    pods = registry.kinds.find("", "v1", "pods")
    pod = registry.get(pods, namespace, name)
    options = delete_options({}, eviction.get("deleteOptions") or {})
    budgets = [] if _is_exempt(pod) else _budgets_of(registry, pod)
    if len(budgets) > 1:
        message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ApiError(500, "InternalError", message)
    if budgets and not _is_evictable_unready(pod, budgets[0]):
        charged = _charged(budgets[0], name, registry.now())
        if not options.dry_run:
            kind = registry.kinds.find("policy", "v1", "poddisruptionbudgets")
            registry.update(
                kind, namespace, charged["metadata"]["name"], charged, WriteOptions("kube-apiserver"), "status"
            )
    registry.delete(pods, namespace, name, options)


def _is_exempt(pod: Object) -> bool:
    """Whether no budget applies: the pod has ended, has not started or is being deleted."""
    pending = (pod.get("status") or {}).get("phase") == "Pending"
    return pending or has_ended(pod) or "deletionTimestamp" in pod["metadata"]


def _budgets_of(registry: Registry, pod: Object) -> list[Object]:
    kind = registry.kinds.find("policy", "v1", "poddisruptionbudgets")
    labels = pod["metadata"].get("labels") or {}
    return [
        budget
        for budget in registry.select(kind, pod["metadata"]["namespace"])
        if matches_labels(budget["spec"].get("selector") or {}, labels)
    ]


def _is_evictable_unready(pod: Object, budget: Object) -> bool:
    """Whether the budget allows the eviction of this pod because it is not ready (`unhealthyPodEvictionPolicy`)."""
    if is_ready(pod):
        return False
    status = budget.get("status") or {}
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    desired: int = status.get("desiredHealthy", 0)
    return desired > 0 and status.get("currentHealthy", 0) >= desired


def _charged(budget: Object, pod: str, now: str) -> Object:
    """The budget with one allowed disruption fewer; raises `ApiError` 429 if none is left."""
    status, name = budget.get("status") or {}, budget["metadata"]["name"]
    if status.get("observedGeneration", 0) < budget["metadata"]["generation"]:
        raise _too_many(f"The disruption budget {name} is still being processed by the server.", retry_s=10)
    disrupted = status.get("disruptedPods") or {}
    if not status.get("disruptionsAllowed"):
        needs, has = status.get("desiredHealthy", 0), status.get("currentHealthy", 0)
        raise _too_many(f"The disruption budget {name} needs {needs} healthy pods and has {has} currently")
    charged = {
        **status,
        "disruptionsAllowed": status["disruptionsAllowed"] - 1,
        "disruptedPods": {**disrupted, pod: now},
    }
    return {**budget, "status": charged}


def _too_many(why: str, retry_s: int | None = None) -> ApiError:
    details: Object = {"causes": [{"reason": "DisruptionBudget", "message": why}]}
    if retry_s is not None:
        details["retryAfterSeconds"] = retry_s
    return ApiError(429, "TooManyRequests", _REFUSED, details)
