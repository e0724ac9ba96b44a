from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.control.scheduler import choose_node
from llmservice_local.objects import requests_of


def node(name: str = "n", **overrides: Any) -> dict[str, Any]:
    capacity = {"cpu": "2", "memory": "4Gi", "pods": "3", "nvidia.com/gpu": "1"}
    found: dict[str, Any] = {
        "metadata": {"name": name, "labels": {"zone": "a", "size": "4"}},
        "spec": {},
        "status": {"allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    return found | overrides


def pod(requests: dict[str, str] | None = None, on: str = "", **spec: Any) -> dict[str, Any]:
    containers = [{"name": "c", "resources": {"requests": requests or {}}}]
    bound = {"nodeName": on} if on else {}
    return {"metadata": {"name": "p"}, "spec": {"containers": containers, **bound, **spec}}


TAIL = "preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod."
HELPLESS = "preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."


@pytest.mark.parametrize(
    ("wanted", "nodes", "there", "why"),
    [
        (pod({"cpu": "500m"}), [node()], [], ""),
        (
            pod({"nvidia.com/gpu": "1"}),
            [node()],
            [pod({"nvidia.com/gpu": "1"}, "n")],
            f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu. {TAIL}",
        ),
        (
            pod({"cpu": "3", "memory": "8Gi"}),
            [node()],
            [],
            f"0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory. {TAIL}",
        ),
        (pod(), [node()], [pod(on="n")] * 3, f"0/1 nodes are available: 1 Too many pods. {HELPLESS}"),
        (
            pod(nodeSelector={"zone": "b"}),
            [node()],
            [],
            f"0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector. {HELPLESS}",
        ),
        (
            pod(),
            [node(spec={"taints": [{"key": "gpu", "value": "only", "effect": "NoSchedule"}]})],
            [],
            f"0/1 nodes are available: 1 node(s) had untolerated taint {{gpu: only}}. {HELPLESS}",
        ),
        (
            pod(tolerations=[{"key": "gpu", "operator": "Exists"}]),
            [node(spec={"taints": [{"key": "gpu", "value": "only", "effect": "NoSchedule"}]})],
            [],
            "",
        ),
        (
            pod(),
            [node(spec={"unschedulable": True})],
            [],
            f"0/1 nodes are available: 1 node(s) were unschedulable. {HELPLESS}",
        ),
        (pod(), [], [], "no nodes available to schedule pods"),
    ],
)
def test_pod_is_placed_or_the_reason_is_the_schedulers_own(
    wanted: dict[str, Any], nodes: list[Any], there: list[Any], why: str
) -> None:
    assert choose_node(wanted, nodes, there) == ("n" if not why else None, why)


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "gpu", "operator": "Exists"}, False),
        ({"key": "gpu", "operator": "DoesNotExist"}, True),
        ({"key": "size", "operator": "Gt", "values": ["3"]}, True),
        ({"key": "size", "operator": "Lt", "values": ["3"]}, False),
    ],
)
def test_required_node_affinity(expression: dict[str, Any], fits: bool) -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    assert (choose_node(pod(affinity=affinity), [node()], [])[0] == "n") is fits


def test_emptier_node_is_taken_first() -> None:
    assert choose_node(pod(), [node("a"), node("b")], [pod(on="a")])[0] == "b"


def test_draining_pod_still_holds_its_gpu_and_an_ended_one_does_not() -> None:
    draining = pod({"nvidia.com/gpu": "1"}, "n")
    draining["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert choose_node(pod({"nvidia.com/gpu": "1"}), [node()], [draining])[0] is None
    ended = {**pod({"nvidia.com/gpu": "1"}, "n"), "status": {"phase": "Succeeded"}}
    assert choose_node(pod({"nvidia.com/gpu": "1"}), [node()], [ended])[0] == "n"


def test_init_containers_count_by_their_largest_and_limits_stand_in_for_requests() -> None:
    wanted = pod({"cpu": "1"}, initContainers=[{"name": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}])
    wanted["spec"]["containers"].append({"name": "d", "resources": {"limits": {"cpu": "500m"}}})
    assert requests_of(wanted) == {"pods": 1, "cpu": 3, "memory": 1024**3}
