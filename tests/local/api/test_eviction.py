from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.api.eviction import evict
from llmservice_local.api.registry import Registry, WriteOptions
from llmservice_local.errors import ApiError

LABELS = {"app": "web"}


@pytest.fixture
def registry() -> Registry:
    return Registry()


def kind(registry: Registry, name: str) -> Any:
    return next(found for found in registry.kinds if found.name == name)


def run_pod(registry: Registry, name: str = "p", *, phase: str = "Running", ready: bool = True) -> None:
    spec = {"containers": [{"name": "c", "image": "i"}], "terminationGracePeriodSeconds": 0}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
    pod = {"metadata": {"name": name, "labels": LABELS}, "spec": spec, "status": status}
    registry.create(kind(registry, "Pod"), "default", pod, WriteOptions())


def protect(registry: Registry, allowed: int, *, name: str = "b", policy: str | None = None, **status: Any) -> None:
    found = kind(registry, "PodDisruptionBudget")
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": LABELS}}
    budget = {"metadata": {"name": name}, "spec": spec | ({"unhealthyPodEvictionPolicy": policy} if policy else {})}
    created = registry.create(found, "default", budget, WriteOptions()).obj
    known = {"observedGeneration": 1, "disruptionsAllowed": allowed, "desiredHealthy": 2, "currentHealthy": 2, **status}
    registry.update(found, "default", name, {**created, "status": known}, WriteOptions(), "status")


def there(registry: Registry) -> list[str]:
    return [pod["metadata"]["name"] for pod in registry.select(kind(registry, "Pod"), "default")]


def test_a_pod_without_a_budget_is_evicted(registry: Registry) -> None:
    run_pod(registry)
    evict(registry, "default", "p", {})
    assert there(registry) == []


def test_a_budget_allows_its_disruptions_and_then_refuses(registry: Registry) -> None:
    run_pod(registry, "p")
    run_pod(registry, "q")
    protect(registry, 1)

    evict(registry, "default", "p", {})
    with pytest.raises(ApiError) as refused:
        evict(registry, "default", "q", {})

    assert (refused.value.code, refused.value.reason) == (429, "TooManyRequests")
    assert there(registry) == ["q"]
    status = registry.get(kind(registry, "PodDisruptionBudget"), "default", "b")["status"]
    assert status["disruptionsAllowed"] == 0
    assert status["disruptedPods"].keys() == {"p"}


def test_a_dry_run_changes_nothing(registry: Registry) -> None:
    run_pod(registry)
    protect(registry, 1)

    evict(registry, "default", "p", {"deleteOptions": {"dryRun": ["All"]}})

    assert there(registry) == ["p"]
    assert registry.get(kind(registry, "PodDisruptionBudget"), "default", "b")["status"]["disruptionsAllowed"] == 1


@pytest.mark.parametrize(
    ("phase", "ready", "policy", "healthy", "goes"),
    [
        ("Running", True, "AlwaysAllow", 2, False),
        ("Running", False, "AlwaysAllow", 1, True),
        ("Running", False, None, 1, False),
        ("Running", False, None, 2, True),
        ("Pending", False, None, 1, True),
        ("Succeeded", False, None, 1, True),
    ],
)
def test_pods_that_do_not_serve_are_evicted_without_a_budget(
    registry: Registry, phase: str, ready: bool, policy: str | None, healthy: int, goes: bool
) -> None:
    run_pod(registry, phase=phase, ready=ready)
    protect(registry, 0, policy=policy, currentHealthy=healthy)

    if goes:
        evict(registry, "default", "p", {})
    else:
        with pytest.raises(ApiError):
            evict(registry, "default", "p", {})

    assert there(registry) == ([] if goes else ["p"])


def test_a_budget_that_was_not_observed_yet_refuses(registry: Registry) -> None:
    run_pod(registry)
    protect(registry, 1, observedGeneration=0)

    with pytest.raises(ApiError) as refused:
        evict(registry, "default", "p", {})

    assert refused.value.details["retryAfterSeconds"] == 10


def test_two_budgets_over_one_pod_are_an_error(registry: Registry) -> None:
    run_pod(registry)
    protect(registry, 1, name="a")
    protect(registry, 1, name="b")

    with pytest.raises(ApiError, match="more than one PodDisruptionBudget"):
        evict(registry, "default", "p", {})
