"""Events of a service, one for each transition of a condition and each change of the replicas, and posting them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable

from llmservice_operator.api.resource import MANAGER, LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import Condition, LLMServiceStatus
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.status.conditions import (
    ADAPTERS_READY,
    DEGRADED,
    INFERENCE_POOL_READY,
    NAME_TAKEN,
    READY,
    SCALED_TO_ZERO,
    SCALING_ACTIVE,
    SIZING_VALID,
    SLO_FEASIBLE,
    rfc3339,
)

_MESSAGE_LIMIT = 1024
_ALARMING = dict.fromkeys((READY, SIZING_VALID, SLO_FEASIBLE, ADAPTERS_READY, INFERENCE_POOL_READY), "False")
_ALARMING |= dict.fromkeys((NAME_TAKEN, DEGRADED), "True")
_CALM = frozenset(
    {
        "Starting", "FetchingModel", "PartlyReady", "Updating", "RollingOut", SCALED_TO_ZERO, "Replacing",
        "AdaptersLoading", "NotApplied",
    }
)  # fmt: skip


def transition_events(service: LLMService, after: LLMServiceStatus, now: float) -> list[Manifest]:
    """The changes from the status that was read to the one that is written."""
    before = {condition.type: condition for condition in service.status.conditions}
    changed = [one for one in after.conditions if _differs(before.get(one.type), one)]
    return [_condition_event(service, condition, now, number) for number, condition in enumerate(changed)]


def scaled_event(service: LLMService, before: int, after: int, reasons: Iterable[str], now: float) -> Manifest:
    verb = "ScaledUp" if after > before else "ScaledDown"
    message = f"{before} -> {after} replicas: {'; '.join(reasons)}"
    return _manifest(service, verb, message, "Normal", now, 99)


def _differs(before: Condition | None, after: Condition) -> bool:
    """A new service has Events about its sizing, problems, and that it serves; not that it starts."""
    if before is None:
        return after.type == SIZING_VALID or (after.type, after.status) == (READY, "True") or _warns(after)
    return (before.status, before.reason) != (after.status, after.reason)


def _warns(condition: Condition) -> bool:
    if condition.type == SCALING_ACTIVE:
        return condition.reason in {"NoMetrics", "NoGateway"}
    return _ALARMING.get(condition.type) == condition.status and condition.reason not in _CALM


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


logger = logging.getLogger(__name__)

_FOLD_S = 600.0
_REMEMBERED = 1024
_MAX_PENDING = 32
"""Events of one service that are kept while the API server can't be reached."""

_Key = tuple[str, str, str]
"""Uid of the service, reason, message."""


class EventRecorder:
    """Posts Events, and never raises, since no pass should be repeated for an Event.

    A repeated Event raises the count of the first one. Events that fail for the moment are posted with the service's
    next Events, or in its next pass.
    """

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._posted: dict[_Key, tuple[float, Manifest]] = {}
        self._pending: dict[tuple[str, str], list[Manifest]] = {}

    async def post(self, namespace: str, name: str, events: Iterable[Manifest], now: float) -> None:
        """Post the pending Events of this service, then the new ones."""
        for event in [*self._pending.pop((namespace, name), []), *events]:
            logger.info("%s/%s: %s", namespace, name, event["message"])
            try:
                await self._post(event, now)
            except KubeError as error:
                logger.warning("event not posted: %s", error)
                pending = self._pending.setdefault((namespace, name), [])
                if error.transient and len(pending) < _MAX_PENDING:
                    pending.append(event)

    def forget(self, namespace: str, name: str) -> None:
        """Drop the pending Events of a service that is gone."""
        self._pending.pop((namespace, name), None)

    async def _post(self, event: Manifest, now: float) -> None:
        key = (event["involvedObject"]["uid"], event["reason"], event["message"])
        since, known = self._posted.pop(key, (0.0, None))
        if known is not None and 0 <= now - since < _FOLD_S:
            folded = {"count": known["count"] + 1, "lastTimestamp": event["lastTimestamp"]}
            if await self._client.patch_event(known["metadata"]["namespace"], known["metadata"]["name"], folded):
                self._remember(key, since, {**known, **folded})
                return
        try:
            await self._client.create_event(event)
        except KubeError as error:
            if error.reason != "AlreadyExists":  # else it was created, and only the answer was lost
                raise
        self._remember(key, now, event)

    def _remember(self, key: _Key, since: float, event: Manifest) -> None:
        self._posted[key] = (since, event)
        if len(self._posted) > _REMEMBERED:
            del self._posted[next(iter(self._posted))]
