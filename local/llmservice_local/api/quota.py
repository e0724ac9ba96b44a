"""ResourceQuotas over pods, as the API server's admission enforces them: a pod beyond one is forbidden.

Counted are the pods that have not ended, and what they request (`pods`, `requests.cpu`, `requests.nvidia.com/gpu` …).
https://kubernetes.io/docs/concepts/policy/resource-quotas/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmservice_local.quantity import parse

Object = dict[str, Any]


def exceeded(pod: Object, pods: Iterable[Object], quotas: Iterable[Object]) -> str | None:
    """What the first quota that `pod` would break says; None where there is room."""
    counted = [other for other in pods if (other.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}]
    for quota in quotas:
        for resource, hard in ((quota.get("spec") or {}).get("hard") or {}).items():
            asked = _amount(pod, resource)
            used = sum(_amount(other, resource) for other in counted)
            if asked and used + asked > parse(str(hard)):
                name = quota["metadata"]["name"]
                figures = f"requested: {resource}={asked:g}, used: {resource}={used:g}, limited: {resource}={hard}"
                return f"exceeded quota: {name}, {figures}"
    return None


def _amount(pod: Object, resource: str) -> float:
    if resource in {"pods", "count/pods"}:
        return 1.0
    what = resource.removeprefix("requests.")
    return float(sum(_requested(container, what) for container in pod["spec"].get("containers") or []))


def _requested(container: Mapping[str, Any], resource: str) -> float:
    resources = container.get("resources") or {}
    found = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
    return float(parse(str(found))) if found is not None else 0.0
