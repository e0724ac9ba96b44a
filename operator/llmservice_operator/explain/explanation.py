"""Why a service is as it is, as plain data: judged from what the API server holds, rendered by others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import AutoscalingStatus, Condition, SizingStatus
from llmservice_operator.explain.remedy import remedy
from llmservice_operator.pods.pod import epoch, pod_of
from llmservice_operator.status.conditions import printable

_EVENTS = 8
_HEALTHY = {
    "Ready": ("True",),
    "Stalled": ("False",),
    "NameTaken": ("False",),
    "SizingValid": ("True",),
    "SLOFeasible": ("True", "Unknown"),
}
"""What a condition may be while nothing is wrong. ScalingActive and Progressing are wrong for some reasons only."""
_WRONG = frozenset({"NoMetrics", "ProgressDeadlineExceeded", "NameConflict", "ApplyFailed", "AdmissionDenied"})


@dataclass(frozen=True, slots=True)
class World:
    """What was read, as the API server returned it."""

    service: Manifest
    deployment: Manifest | None
    pods: Sequence[Manifest]
    events: Sequence[Manifest]
    last_lines: Mapping[str, str] = field(default_factory=dict)
    """The last line of a pod's log, by pod."""


@dataclass(frozen=True, slots=True)
class Problem:
    condition: str
    reason: str
    message: str
    since: str | None
    remedy: str | None


@dataclass(frozen=True, slots=True)
class PodLine:
    name: str
    state: str
    """Ready, Starting, Terminating, or the reason of what keeps it from serving."""
    restarts: int
    created: str
    message: str | None
    last_line: str | None


@dataclass(frozen=True, slots=True)
class EventLine:
    time: str
    type: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that somebody asks at night, the most urgent first."""

    namespace: str
    name: str
    model: str
    served_name: str
    healthy: bool
    headline: str
    problems: tuple[Problem, ...]
    desired: int
    ready: int
    bounds: tuple[int, int] | None
    """Least and most replicas, with autoscaling."""
    sizing: SizingStatus | None
    autoscaling: AutoscalingStatus | None
    pods: tuple[PodLine, ...]
    events: tuple[EventLine, ...]


def explain(world: World) -> Explanation:
    """Judge a service by what was read of it."""
    service = LLMService.model_validate(world.service)
    status, spec = service.status, service.spec
    problems = tuple(_problems(service))
    scaling = spec.autoscaling
    return Explanation(
        namespace=service.namespace,
        name=service.name,
        model=spec.model.uri,
        served_name=service.served_name,
        healthy=not problems,
        headline=_headline(service, problems),
        problems=problems,
        desired=_desired(service, world.deployment),
        ready=status.ready_replicas,
        bounds=(scaling.min_replicas, scaling.max_replicas) if scaling else None,
        sizing=status.sizing,
        autoscaling=status.autoscaling,
        pods=tuple(_pod_line(pod, world.last_lines) for pod in world.pods),
        events=tuple(_event_lines(world.events)),
    )


def _problems(service: LLMService) -> Iterable[Problem]:
    status = service.status
    if not status.conditions:
        yield _problem(service, "Ready", "NotReconciled", "no operator has looked at this service yet", None)
        return
    if status.observed_generation < service.metadata.generation:
        message = (
            f"the spec is at generation {service.metadata.generation}, the operator at {status.observed_generation}"
        )
        yield _problem(service, "Ready", "BehindSpec", message, None)
    said: set[str] = set()
    for condition in status.conditions:
        if _wrong(condition) and condition.message not in said:
            said.add(condition.message)
            yield _problem(service, condition.type, condition.reason, condition.message, condition.last_transition_time)


def _wrong(condition: Condition) -> bool:
    fine = _HEALTHY.get(condition.type)
    return condition.status not in fine if fine else condition.reason in _WRONG


def _problem(service: LLMService, condition: str, reason: str, message: str, since: str | None) -> Problem:
    return Problem(condition, reason, message, since, remedy(reason, service.namespace, service.name))


def _headline(service: LLMService, problems: Sequence[Problem]) -> str:
    ready = service.status.condition("Ready")
    if ready is not None and ready.status == "True":
        return ready.message if not problems else f"Serving, but {problems[0].reason}"
    return f"{problems[0].reason}: {problems[0].message}" if problems else "Not Ready"


def _desired(service: LLMService, deployment: Manifest | None) -> int:
    known = service.status.autoscaling
    if known is not None:
        return known.desired_replicas
    return int(((deployment or {}).get("spec") or {}).get("replicas", service.spec.replicas))


def _pod_line(manifest: Manifest, last_lines: Mapping[str, str]) -> PodLine:
    pod = pod_of(manifest)
    state = "Ready" if pod.serves else "Starting"
    state = pod.trouble.reason if pod.trouble and not pod.serves else state
    line = last_lines.get(pod.name)
    return PodLine(
        name=pod.name,
        state="Terminating" if pod.terminating else state,
        restarts=pod.restarts,
        created=manifest["metadata"]["creationTimestamp"],
        message=printable(pod.trouble.message) if pod.trouble else None,
        last_line=printable(line) if line else None,
    )


def _event_lines(events: Sequence[Manifest]) -> Iterable[EventLine]:
    """The newest, newest first."""
    timed = [
        (
            str(
                event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or ""
            ),
            event,
        )
        for event in events
    ]
    for time, event in sorted((one for one in timed if one[0]), key=lambda one: epoch(one[0]), reverse=True)[:_EVENTS]:
        yield EventLine(
            time=time,
            type=str(event.get("type", "")),
            reason=str(event.get("reason", "")),
            message=printable(str(event.get("message", ""))),
            count=int(event.get("count") or 1),
        )


def document(explanation: Explanation) -> dict[str, Any]:
    """The same for machines, in the CRD's own spelling."""
    return {
        "namespace": explanation.namespace,
        "name": explanation.name,
        "model": explanation.model,
        "servedName": explanation.served_name,
        "healthy": explanation.healthy,
        "headline": explanation.headline,
        "problems": [
            {
                "condition": one.condition,
                "reason": one.reason,
                "message": one.message,
                "since": one.since,
                "remedy": one.remedy,
            }
            for one in explanation.problems
        ],
        "replicas": {
            "desired": explanation.desired,
            "ready": explanation.ready,
            **({"min": explanation.bounds[0], "max": explanation.bounds[1]} if explanation.bounds else {}),
        },
        "sizing": explanation.sizing and explanation.sizing.model_dump(by_alias=True, exclude_none=True),
        "autoscaling": explanation.autoscaling and explanation.autoscaling.model_dump(by_alias=True, exclude_none=True),
        "pods": [
            {
                "name": pod.name,
                "state": pod.state,
                "restarts": pod.restarts,
                "created": pod.created,
                "message": pod.message,
                "lastLine": pod.last_line,
            }
            for pod in explanation.pods
        ],
        "events": [
            {
                "time": event.time,
                "type": event.type,
                "reason": event.reason,
                "message": event.message,
                "count": event.count,
            }
            for event in explanation.events
        ],
    }
