"""The five conditions: each verdict is a pure function of what was observed, its message says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from llmservice_operator.feasibility import Feasibility
from llmservice_operator.pod import Pod, Trouble
from llmservice_operator.scaling import Decision
from llmservice_operator.sizing import Sized, SizingProblem
from llmservice_operator.spec import Manifest
from llmservice_operator.status import Condition

READY, PROGRESSING, SIZING_VALID = "Ready", "Progressing", "SizingValid"
SCALING_ACTIVE, SLO_FEASIBLE = "ScalingActive", "SLOFeasible"

Status = Literal["True", "False", "Unknown"]
_MESSAGE_LIMIT = 2048


@dataclass(frozen=True, slots=True)
class Verdict:
    """One condition before it meets its past."""

    type: str
    status: Status
    reason: str
    message: str


def conditions(
    before: Iterable[Condition], verdicts: Iterable[Verdict], generation: int, now: float
) -> list[Condition]:
    """The new list; the transition time moves only where the status flips."""
    past = {condition.type: condition for condition in before}
    return [_condition(past.get(verdict.type), verdict, generation, now) for verdict in verdicts]


def _condition(past: Condition | None, verdict: Verdict, generation: int, now: float) -> Condition:
    same = past is not None and past.status == verdict.status
    return Condition(
        type=verdict.type,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message[:_MESSAGE_LIMIT],
        last_transition_time=past.last_transition_time if past is not None and same else rfc3339(now),
        observed_generation=generation,
    )


def rfc3339(time_s: float) -> str:
    """A moment as Kubernetes writes it, to the second."""
    return datetime.fromtimestamp(int(time_s), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sizing_verdict(sizing: Sized | SizingProblem) -> Verdict:
    if isinstance(sizing, SizingProblem):
        return Verdict(SIZING_VALID, "False", sizing.reason, sizing.message)
    plan = sizing.plan
    message = (
        f"{plan.max_num_seqs} sequences at once, each up to {plan.max_model_len} tokens, limited by {plan.limited_by}"
    )
    return Verdict(SIZING_VALID, "True", "Fits", message)


def ready_verdict(desired: int, pods: Sequence[Pod], sizing: Sized | SizingProblem, blocked: Trouble | None) -> Verdict:
    """Ready means that somebody answers requests now. `blocked` is what kept the operator from applying children."""
    ready = sum(pod.serves for pod in pods)
    if ready == 0:
        why = _not_ready(desired, pods, sizing, blocked)
        return Verdict(READY, "False", why.reason, why.message)
    if isinstance(sizing, SizingProblem):
        message = f"{ready} replicas serve an earlier spec; the present one can't be served: {sizing.message}"
        return Verdict(READY, "True", "ServingEarlierSpec", message)
    troubles = "".join(f"; {one.reason}: {one.message}" for one in _troubles(pods))
    reason = "Serving" if ready >= desired else "PartlyReady"
    return Verdict(READY, "True", reason, f"{ready} of {desired} replicas are ready{troubles}")


def _not_ready(desired: int, pods: Sequence[Pod], sizing: Sized | SizingProblem, blocked: Trouble | None) -> Trouble:
    """The first thing to look at, from the spec down to the pods."""
    if isinstance(sizing, SizingProblem):
        return Trouble(sizing.reason, sizing.message)
    if blocked is not None:
        return blocked
    if desired == 0:
        return Trouble("ScaledToZero", "no replica is asked for: raise spec.replicas to serve")
    if troubles := _troubles(pods):
        return troubles[0]
    return Trouble("Starting", f"0 of {desired} replicas are ready, {len(pods)} pods are starting")


def progressing_verdict(
    deployment: Manifest | None,
    desired: int,
    pods: Sequence[Pod],
    sizing: Sized | SizingProblem,
    blocked: Trouble | None,
) -> Verdict:
    """Progressing means that the operator or Kubernetes still works towards the spec."""
    if isinstance(sizing, SizingProblem):
        return Verdict(PROGRESSING, "False", sizing.reason, "nothing is changed until the spec can be served")
    if blocked is not None:
        return Verdict(PROGRESSING, "False", blocked.reason, blocked.message)
    status: dict[str, Any] = (deployment or {}).get("status") or {}
    deadline = _deployment_condition(status, "Progressing")
    if deadline.get("reason") == "ProgressDeadlineExceeded":
        return Verdict(PROGRESSING, "False", "ProgressDeadlineExceeded", str(deadline.get("message", "")))
    counts = [int(status.get(key, 0)) for key in ("updatedReplicas", "readyReplicas", "replicas")]
    generation = ((deployment or {}).get("metadata") or {}).get("generation", 0)
    if deployment is not None and status.get("observedGeneration", 0) >= generation and set(counts) == {desired}:
        return Verdict(PROGRESSING, "False", "Settled", f"all {desired} replicas run the present spec")
    if troubles := _troubles(pods):
        return Verdict(PROGRESSING, "True", troubles[0].reason, troubles[0].message)
    return Verdict(PROGRESSING, "True", "RollingOut", f"{counts[0]} of {desired} replicas run the present spec")


def scaling_verdict(
    decision: Decision, pods: Sequence[Pod], sizing: Sized | SizingProblem, *, autoscaled: bool
) -> Verdict:
    if not autoscaled:
        return Verdict(
            SCALING_ACTIVE, "False", "FixedReplicas", "spec.replicas rules; set spec.autoscaling to change that"
        )
    if isinstance(sizing, SizingProblem):
        return Verdict(
            SCALING_ACTIVE, "False", "SizingInvalid", "replicas stay as they are until the spec can be served"
        )
    if not decision.active and not any(pod.serves for pod in pods):
        return Verdict(SCALING_ACTIVE, "Unknown", "NoReadyPods", "; ".join(decision.reasons))
    if not decision.active:
        return Verdict(SCALING_ACTIVE, "False", "NoMetrics", "; ".join(decision.reasons))
    asks = f"the load asks for {decision.wanted} replicas, {decision.replicas} are set"
    return Verdict(SCALING_ACTIVE, "True", "FollowingLoad", f"{asks}; status.autoscaling says why")


def slo_verdict(feasibility: Feasibility) -> Verdict:
    return Verdict(SLO_FEASIBLE, feasibility.status, feasibility.reason, feasibility.message)


def _troubles(pods: Sequence[Pod]) -> list[Trouble]:
    """Each kind of trouble once, terminating pods left out."""
    found = {pod.trouble.reason: pod.trouble for pod in pods if pod.trouble and not pod.terminating}
    return list(found.values())


def _deployment_condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((one for one in status.get("conditions") or [] if one.get("type") == kind), {})
