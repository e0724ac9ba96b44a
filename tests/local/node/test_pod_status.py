from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.node.pod_status import phase, pod_status

RUNNING = {"running": {"startedAt": "t"}}
WAITING = {"waiting": {"reason": "ContainerCreating"}}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


def status(state: dict[str, Any], name: str = "c", *, ready: bool = False, restarts: int = 0) -> dict[str, Any]:
    return {"name": name, "state": state, "lastState": {}, "ready": ready, "restartCount": restarts}


@pytest.mark.parametrize(
    ("init", "containers", "policy", "expected"),
    [
        ([], [WAITING], "Always", "Pending"),
        ([], [RUNNING], "Always", "Running"),
        ([RUNNING], [WAITING], "Always", "Pending"),
        ([ended(0)], [RUNNING], "Always", "Running"),
        ([ended(1)], [WAITING], "Always", "Pending"),
        ([ended(1)], [WAITING], "Never", "Failed"),
        ([], [ended(1)], "Always", "Running"),
        ([], [ended(0)], "Never", "Succeeded"),
        ([], [ended(1)], "Never", "Failed"),
        ([], [ended(1), RUNNING], "Never", "Running"),
        ([], [ended(1)], "OnFailure", "Running"),
    ],
)
def test_phase(init: list[Any], containers: list[Any], policy: str, expected: str) -> None:
    assert phase([status(state) for state in init], [status(state) for state in containers], policy) == expected


def test_ready_pod_keeps_its_transition_times_until_something_flips() -> None:
    pod: dict[str, Any] = {"spec": {"containers": [{"name": "c"}]}}
    ready = [status(RUNNING, ready=True)]
    first = pod_status(pod, [], ready, "127.0.9.2", "127.0.0.1", "t1")
    assert {condition["status"] for condition in first["conditions"]} == {"True"}
    again = pod_status({**pod, "status": first}, [], ready, "127.0.9.2", "127.0.0.1", "t2")
    assert again == first
    unready = pod_status({**pod, "status": first}, [], [status(RUNNING)], "127.0.9.2", "127.0.0.1", "t3")
    changed = {condition["type"]: condition for condition in unready["conditions"] if condition["status"] == "False"}
    assert set(changed) == {"Ready", "ContainersReady"}
    assert changed["Ready"]["reason"] == "ContainersNotReady"
    assert changed["Ready"]["message"] == "containers with unready status: [c]"
    assert changed["Ready"]["lastTransitionTime"] == "t3"
