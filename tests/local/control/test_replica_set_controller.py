from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from llmservice_local.control.replica_set_controller import pods_to_delete, replica_set_status

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def pod(name: str, *, node: str = "n", ready: bool = True, cost: str = "", since: str = "2026-01-01T11:00:00Z") -> Any:
    conditions = [{"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": since}]
    annotations = {"controller.kubernetes.io/pod-deletion-cost": cost} if cost else {}
    return {
        "metadata": {"name": name, "annotations": annotations, "creationTimestamp": since},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": "Running" if node else "Pending", "conditions": conditions},
    }


def names(pods: list[Any], count: int) -> list[str]:
    return [chosen["metadata"]["name"] for chosen in pods_to_delete(pods, count)]


def test_pods_that_do_not_serve_are_deleted_first_and_then_the_cheap_ones() -> None:
    pods = [
        pod("dear", cost="9"),
        pod("cheap", cost="-5"),
        pod("plain"),
        pod("unready", ready=False, cost="99"),
        pod("unscheduled", node=""),
    ]
    assert names(pods, 5) == ["unscheduled", "unready", "cheap", "plain", "dear"]
    assert names(pods, 0) == []


def test_of_equal_pods_the_younger_is_deleted() -> None:
    old, young = pod("old", since="2026-01-01T10:00:00Z"), pod("young", since="2026-01-01T11:00:00Z")
    assert names([old, young], 1) == ["young"]


def test_cost_that_is_no_number_counts_as_none() -> None:
    assert names([pod("odd", cost="much"), pod("cheap", cost="-1")], 1) == ["cheap"]


def test_pod_is_available_once_it_has_been_ready_long_enough() -> None:
    replica_set = {"metadata": {"generation": 3}, "spec": {"minReadySeconds": 60}, "status": {"readyReplicas": 1}}
    pods = [pod("old"), pod("new", since="2026-01-01T11:59:30Z"), pod("not", ready=False)]
    status, again_s = replica_set_status(replica_set, pods, NOW)
    assert status == {
        "replicas": 3,
        "fullyLabeledReplicas": 3,
        "readyReplicas": 2,
        "availableReplicas": 1,
        "observedGeneration": 3,
    }
    assert again_s == 30


def test_counts_that_fell_to_zero_are_taken_out_of_the_status() -> None:
    replica_set = {"metadata": {"generation": 1}, "spec": {}, "status": {"readyReplicas": 1, "availableReplicas": 1}}
    status, _ = replica_set_status(replica_set, [], NOW)
    assert (status["readyReplicas"], status["availableReplicas"]) == (None, None)


def test_a_refused_pod_is_a_condition_until_it_is_created() -> None:
    replica_set: Any = {"metadata": {"generation": 1}, "spec": {"replicas": 1}}

    refused, _ = replica_set_status(replica_set, [], NOW, "exceeded quota: q")
    replica_set["status"] = refused
    later, _ = replica_set_status(replica_set, [], NOW)

    (failure,) = refused["conditions"]
    assert (failure["type"], failure["reason"], failure["message"]) == (
        "ReplicaFailure",
        "FailedCreate",
        "exceeded quota: q",
    )
    assert later["conditions"] is None
