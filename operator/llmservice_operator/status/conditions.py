"""The six conditions: each verdict is a pure function of what was observed, its message says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from llmservice_operator.api import labels
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import Condition
from llmservice_operator.pods.pod import OOM_REMEDY, Pod, Trouble
from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.scaling import Decision
from llmservice_operator.sizing.sizing import Sized, SizingProblem
from llmservice_operator.sizing.sizing_report import SizingReport
from llmservice_operator.status.denial import denial_reason, pods_denied

READY, PROGRESSING, STALLED, SIZING_VALID = "Ready", "Progressing", "Stalled", "SizingValid"
SCALING_ACTIVE, SLO_FEASIBLE = "ScalingActive", "SLOFeasible"
NAME_TAKEN = "NameTaken"
"""There only where it is True."""

UPDATING = "Updating"
"""Reason of a service that would be Ready, had Kubernetes taken up the present spec already."""

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
    before: Iterable[Condition], verdicts: Iterable[Verdict | Condition], generation: int, now: float
) -> list[Condition]:
    """The new list; the transition time moves only where the status flips. A condition is kept as it is."""
    past = {condition.type: condition for condition in before}
    return [
        verdict if isinstance(verdict, Condition) else _condition(past.get(verdict.type), verdict, generation, now)
        for verdict in verdicts
    ]


def _condition(past: Condition | None, verdict: Verdict, generation: int, now: float) -> Condition:
    same = past is not None and past.status == verdict.status
    return Condition(
        type=verdict.type,
        status=verdict.status,
        reason=verdict.reason,
        message=printable(verdict.message)[:_MESSAGE_LIMIT],
        last_transition_time=past.last_transition_time if past is not None and same else rfc3339(now),
        observed_generation=generation,
    )


def printable(text: str) -> str:
    """One line without control characters: what a pod logged last may end up on a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def rfc3339(time_s: float) -> str:
    """A moment as Kubernetes writes it, to the second."""
    return datetime.fromtimestamp(int(time_s), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sizing_verdict(sizing: Sized | SizingProblem) -> Verdict:
    if isinstance(sizing, SizingProblem):
        return Verdict(SIZING_VALID, "False", sizing.reason, sizing.message)
    if sizing.self_sized:
        return _self_sizing_verdict(sizing.report)
    plan = sizing.plan
    assert plan is not None  # noqa: S101 - what the operator sizes has a plan
    message = (
        f"{plan.max_num_seqs} sequences at once, each up to {plan.max_model_len} tokens, limited by {plan.limited_by}"
    )
    return Verdict(SIZING_VALID, "True", "Fits", message)


def _self_sizing_verdict(report: SizingReport | None) -> Verdict:
    if report is None:
        message = (
            "the model's figures can't be read before a pod runs: the server sizes itself and what it found will be"
            " shown here; spec.model.shape would tell now"
        )
        return Verdict(SIZING_VALID, "Unknown", "AwaitingPod", message)
    message = (
        f"{report.max_num_seqs} sequences at once, each up to {report.max_model_len} tokens, worked out by the server"
    )
    return Verdict(SIZING_VALID, "True", "SizedByServer", message)


def ready_verdict(
    deployment: Manifest | None,
    desired: int,
    pods: Sequence[Pod],
    sizing: Sized | SizingProblem,
    blocked: Trouble | None,
) -> Verdict:
    """Ready means that the present spec is served by as many replicas as are wanted, be that none.

    `blocked` is what kept the operator from applying the Deployment or a Service.
    """
    ready = sum(pod.serves for pod in pods)
    present = serving_present(deployment, pods)
    if isinstance(sizing, SizingProblem) or blocked is not None:
        return _earlier_spec(ready, _held_up(sizing, blocked))
    if desired == 0:
        return Verdict(READY, "True", "ScaledToZero", "no replica is asked for: raise spec.replicas to serve")
    troubles = _troubles(deployment, pods)
    said = "".join(f"; {one.reason}: {one.message}" for one in troubles)
    if present < min(ready, desired):
        which = f"{present} of {desired} replicas serve the present spec, {ready - present} an earlier one{said}"
        return Verdict(READY, "False", "ServingEarlierSpec" if troubles else "RollingOut", which)
    counted = f"{present} of {desired} replicas are ready{said}{_restarted(pods)}"
    if present < desired:
        waiting = "PartlyReady" if present else "Starting"
        return Verdict(READY, "False", troubles[0].reason if troubles else waiting, counted)
    if not observed(deployment):
        return Verdict(READY, "False", UPDATING, f"{counted}; Kubernetes has not taken up the present spec yet")
    return Verdict(READY, "True", "Serving", counted)


def serving_present(deployment: Manifest | None, pods: Iterable[Pod]) -> int:
    """How many pods of the Deployment's present template serve."""
    template: dict[str, Any] = ((deployment or {}).get("spec") or {}).get("template") or {}
    present = ((template.get("metadata") or {}).get("annotations") or {}).get(labels.TEMPLATE)
    return sum(pod.serves and pod.template == present for pod in pods)


def _restarted(pods: Iterable[Pod]) -> str:
    killed = sum(pod.serves and pod.out_of_memory for pod in pods)
    return f"; OOMKilled: {killed} of them restarted after being killed for memory: {OOM_REMEDY}" if killed else ""


def _earlier_spec(ready: int, why: Trouble) -> Verdict:
    """What can't be served or applied now does not end what runs already, but it is not what was asked for."""
    if not ready:
        return Verdict(READY, "False", why.reason, why.message)
    message = f"{ready} replicas serve an earlier spec; the present one is held up: {why.reason}: {why.message}"
    return Verdict(READY, "False", "ServingEarlierSpec", message)


def _held_up(sizing: Sized | SizingProblem, blocked: Trouble | None) -> Trouble:
    if isinstance(sizing, SizingProblem):
        return Trouble(sizing.reason, sizing.message)
    assert blocked is not None  # noqa: S101 - one of the two holds it up
    return _lifted(blocked)


def _lifted(blocked: Trouble) -> Trouble:
    return Trouble(denial_reason(blocked.message, blocked.reason), blocked.message)


def observed(deployment: Manifest | None) -> bool:
    """Whether Kubernetes has seen the Deployment as it is now."""
    if deployment is None:
        return False
    seen = (deployment.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= deployment["metadata"].get("generation", 0))


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
        why = _lifted(blocked)
        return Verdict(PROGRESSING, "False", why.reason, why.message)
    status: dict[str, Any] = (deployment or {}).get("status") or {}
    if late := _too_late(deployment):
        return Verdict(PROGRESSING, "False", late.reason, late.message)
    counts = [int(status.get(key, 0)) for key in ("updatedReplicas", "readyReplicas", "replicas")]
    if observed(deployment) and set(counts) == {desired}:
        return Verdict(PROGRESSING, "False", "Settled", f"all {desired} replicas run the present spec")
    if troubles := _troubles(deployment, pods):
        return Verdict(PROGRESSING, "True", troubles[0].reason, troubles[0].message)
    present = serving_present(deployment, pods)
    return Verdict(PROGRESSING, "True", "RollingOut", f"{present} of {desired} replicas serve the present spec")


def stalled_verdict(ready: Verdict, progressing: Verdict) -> Verdict:
    """Stalled means that nothing more happens until somebody acts, as kstatus reads it.

    https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
    """
    moves = progressing.status == "True" or progressing.reason in {"Settled", "Replacing"}
    if moves or ready.status == "True":
        return Verdict(STALLED, "False", "NotStalled", "nothing keeps the service from the present spec for good")
    return Verdict(STALLED, "True", progressing.reason, progressing.message)


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


def name_verdict(name: str, namespace: str, holder: str | None) -> Verdict | None:
    """NameTaken, where the gateway looks for the name in another namespace, `holder`."""
    if holder is None or holder == namespace:
        return None
    why = "means that namespace" if name.startswith(f"{holder}/") else "belongs to an older service there"
    message = (
        f"the gateway looks for {name} in the namespace {holder}, for the name {why}: clients reach this service as"
        f" {namespace}/{name}; or set another model.servedName"
    )
    return Verdict(NAME_TAKEN, "True", "NameTaken", message)


def slo_verdict(feasibility: Feasibility | None) -> Verdict:
    if feasibility is None:
        return Verdict(SLO_FEASIBLE, "Unknown", "NotAssessed", "nothing was measured yet")
    return Verdict(SLO_FEASIBLE, feasibility.status, feasibility.reason, feasibility.message)


def _troubles(deployment: Manifest | None, pods: Sequence[Pod]) -> list[Trouble]:
    """Each kind of trouble once, terminating pods left out: the pods' own, then what keeps pods from being made."""
    whole = [trouble for trouble in (pods_denied(deployment), _too_late(deployment)) if trouble]
    own = [pod.trouble for pod in pods if pod.trouble and not pod.terminating]
    return list({trouble.reason: trouble for trouble in (*own, *whole)}.values())


def _too_late(deployment: Manifest | None) -> Trouble | None:
    status: dict[str, Any] = (deployment or {}).get("status") or {}
    progress: dict[str, Any] = next(
        (one for one in status.get("conditions") or [] if one.get("type") == "Progressing"), {}
    )
    if progress.get("reason") != "ProgressDeadlineExceeded":
        return None
    return Trouble("ProgressDeadlineExceeded", str(progress.get("message") or "the rollout takes too long"))
