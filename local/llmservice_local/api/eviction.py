"""`POST pods/NAME/eviction`: a deletion that asks the disruption budgets first. It is what `kubectl drain` sends.

The rules are upstream's (k8s.io/kubernetes/pkg/registry/core/pod/storage/eviction.go).
"""

from __future__ import annotations

from typing import Any

from llmservice_local.api.errors import ApiError, bad_request
from llmservice_local.api.registry import Registry, WriteOptions
from llmservice_local.api.request import delete_options
from llmservice_local.api.selector import matches_labels
from llmservice_local.control.condition import condition_of

Object = dict[str, Any]

_REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."


def evict(registry: Registry, namespace: str, name: str, eviction: Any) -> None:
    """Delete the pod where its budget allows it; raises `ApiError` 429 where it does not."""
    if not isinstance(eviction, dict):
        raise bad_request(f"an Eviction is an object, not {type(eviction).__name__}")
    pods = registry.kinds.find("", "v1", "pods")
    pod = registry.get(pods, namespace, name)
    options = delete_options({}, eviction.get("deleteOptions") or {})
    budgets = [] if _counts_for_nobody(pod) else _budgets_of(registry, pod)
    if len(budgets) > 1:
        message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ApiError(500, "InternalError", message)
    if budgets and not _may_go_unhealthy(pod, budgets[0]):
        charged = _charged(budgets[0], name, registry.now())
        if not options.dry_run:
            kind = registry.kinds.find("policy", "v1", "poddisruptionbudgets")
            registry.update(
                kind, namespace, charged["metadata"]["name"], charged, WriteOptions("kube-apiserver"), "status"
            )
    registry.delete(pods, namespace, name, options)


def _counts_for_nobody(pod: Object) -> bool:
    """Pods that have ended, have not begun or are going already disrupt nothing when they go."""
    phase = (pod.get("status") or {}).get("phase")
    return phase in {"Succeeded", "Failed", "Pending"} or "deletionTimestamp" in pod["metadata"]


def _budgets_of(registry: Registry, pod: Object) -> list[Object]:
    kind = registry.kinds.find("policy", "v1", "poddisruptionbudgets")
    labels = pod["metadata"].get("labels") or {}
    return [
        budget
        for budget in registry.select(kind, pod["metadata"]["namespace"])
        if matches_labels(budget["spec"].get("selector") or {}, labels)
    ]


def _may_go_unhealthy(pod: Object, budget: Object) -> bool:
    """A pod that is not ready may go always, or, by default, while the others are enough."""
    if condition_of(pod, "Ready").get("status") == "True":
        return False
    status = budget.get("status") or {}
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    desired: int = status.get("desiredHealthy", 0)
    return desired > 0 and status.get("currentHealthy", 0) >= desired


def _charged(budget: Object, pod: str, now: str) -> Object:
    """The budget with one disruption less to give; raises `ApiError` 429 where it has none."""
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
