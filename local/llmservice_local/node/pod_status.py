"""A pod's phase, conditions and status, as pure functions of its containers' statuses."""

from __future__ import annotations

from collections.abc import Sequence

from llmservice_local.objects import Object, condition_of, with_condition


def phase(init: Sequence[Object], containers: Sequence[Object], restart_policy: str) -> str:
    """Pending, Running, Succeeded or Failed."""
    failed_init = any(_exit_code(status) not in {None, 0} for status in init)
    if failed_init and restart_policy == "Never":
        return "Failed"
    started = [status for status in containers if _has_begun(status)]
    if len(started) < len(containers) or not all(_exit_code(status) == 0 for status in init):
        return "Pending"
    codes = [_exit_code(status) for status in containers]
    if restart_policy == "Always" or any(code is None for code in codes):
        return "Running"
    if all(code == 0 for code in codes):
        return "Succeeded"
    return "Failed" if restart_policy == "Never" else "Running"


def pod_status(
    pod: Object, init: Sequence[Object], containers: Sequence[Object], address: str, host: str, now: str
) -> Object:
    """The whole status that the node reports."""
    before = pod.get("status") or {}
    status: Object = {
        "phase": phase(init, containers, pod["spec"].get("restartPolicy", "Always")),
        "conditions": before.get("conditions") or [],
        "hostIP": host,
        "hostIPs": [{"ip": host}],
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": before.get("startTime") or now,
        "containerStatuses": list(containers),
    }
    if init:
        status["initContainerStatuses"] = list(init)
    ended = status["phase"] in {"Succeeded", "Failed"}
    waiting = [item["name"] for item in init if _exit_code(item) != 0]
    unready = [item["name"] for item in containers if not item["ready"]]
    why_uninitialized = f"containers with incomplete status: [{' '.join(waiting)}]" if waiting else ""
    why_unready = f"containers with unready status: [{' '.join(unready)}]" if unready else ""
    for kind, problem, reason in (
        ("PodReadyToStartContainers", "", ""),
        ("Initialized", why_uninitialized, "ContainersNotInitialized"),
        ("ContainersReady", why_unready, "ContainersNotReady"),
        ("Ready", why_unready, "ContainersNotReady"),
        ("PodScheduled", "", ""),
    ):
        condition: Object = {"type": kind, "status": "False" if problem else "True"}
        if problem:
            condition |= {"reason": "PodCompleted" if ended else reason, "message": problem}
        known = condition_of({"status": status}, kind)
        if {name: value for name, value in known.items() if name != "lastTransitionTime"} != condition:
            status = with_condition(status, condition, now)
    return status


def _exit_code(status: Object) -> int | None:
    code: int | None = (status["state"].get("terminated") or {}).get("exitCode")
    return code


def _has_begun(status: Object) -> bool:
    return (
        "running" in status["state"]
        or "terminated" in status["state"]
        or status["restartCount"] > 0
        or bool(status["lastState"])
    )
