"""Events of a service: one where a condition flips or changes its reason, one where the number of replicas changes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from llmservice_operator.api.resource import MANAGER, LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import Condition, LLMServiceStatus
from llmservice_operator.status.conditions import READY, SCALING_ACTIVE, SIZING_VALID, SLO_FEASIBLE, rfc3339

_MESSAGE_LIMIT = 1024
_ALARMING = frozenset({READY, SIZING_VALID, SLO_FEASIBLE})
_CALM = frozenset({"Starting", "FetchingModel", "PartlyReady", "Updating", "RollingOut", "ScaledToZero", "Replacing"})


def transition_events(service: LLMService, after: LLMServiceStatus, now: float) -> list[Manifest]:
    """What changed between the status that was read and the one that is written."""
    before = {condition.type: condition for condition in service.status.conditions}
    changed = [one for one in after.conditions if _differs(before.get(one.type), one)]
    return [_condition_event(service, condition, now, number) for number, condition in enumerate(changed)]


def scaled_event(service: LLMService, before: int, after: int, reasons: Iterable[str], now: float) -> Manifest:
    verb = "ScaledUp" if after > before else "ScaledDown"
    message = f"{before} -> {after} replicas: {'; '.join(reasons)}"
    return _manifest(service, verb, message, "Normal", now, 99)


def _differs(before: Condition | None, after: Condition) -> bool:
    """A new service tells only of its sizing, of what is wrong, and that it serves; that it starts is no news."""
    if before is None:
        return after.type == SIZING_VALID or (after.type, after.status) == (READY, "True") or _warns(after)
    return (before.status, before.reason) != (after.status, after.reason)


def _warns(condition: Condition) -> bool:
    if condition.type == SCALING_ACTIVE:
        return condition.reason == "NoMetrics"
    return condition.status == "False" and condition.type in _ALARMING and condition.reason not in _CALM


def _condition_event(service: LLMService, condition: Condition, now: float, number: int) -> Manifest:
    message = f"{condition.type} is {condition.status}: {condition.message}"
    return _manifest(service, condition.reason, message, "Warning" if _warns(condition) else "Normal", now, number)


def _manifest(service: LLMService, reason: str, message: str, kind: str, now: float, number: int) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{service.name}.{int(now * 1e6):x}{number:02d}", "namespace": service.namespace},
        "involvedObject": service.reference(),
        "reason": reason,
        "message": message[:_MESSAGE_LIMIT],
        "type": kind,
        "count": 1,
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": f"{socket.gethostname()}-{os.getpid()}",
    }
