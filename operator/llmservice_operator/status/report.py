"""The status that a service should have, from what a pass observed and decided, and the patch that writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import (
    AdapterStatus,
    AutoscalingStatus,
    ColdStartStatus,
    Condition,
    LLMServiceStatus,
    MeasuredStatus,
    SizingStatus,
)
from llmservice_operator.children.expected import service_url
from llmservice_operator.cluster.applier import Refusal
from llmservice_operator.correction import max_num_seqs_now
from llmservice_operator.pods.cold_start import ColdStart
from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.pods.pod_model import Fetching, PodAdapter
from llmservice_operator.scaling.decision import Decision, ScalingState, scale_policy
from llmservice_operator.scaling.load import Load
from llmservice_operator.sizing import Sized, SizingProblem
from llmservice_operator.status.autoscaling_status import (
    UNLIMITED,
    WriteAllowance,
    capacity_status,
    demand_status,
    gpu_hours_status,
    log_decision,
    rounded,
    signals_status,
    throttled,
)
from llmservice_operator.status.conditions import (
    DEGRADED,
    PROGRESSING,
    READY,
    SCALING_ACTIVE,
    SIZING_VALID,
    SLO_FEASIBLE,
    STALLED,
    UPDATING,
    Verdict,
    access_verdict,
    adapters_verdict,
    conditions,
    degraded_verdict,
    inference_pool_verdict,
    name_verdict,
    pods_with,
    progressing_verdict,
    ready_verdict,
    rfc3339,
    scaling_verdict,
    sizing_verdict,
    stalled_verdict,
    while_fetching,
)
from llmservice_operator.status.model_status import (
    expected_tokens,
    is_of,
    measured_status,
    model_status,
    sizing_status,
)
from llmservice_operator.status.prediction_status import measured_blocks, predictions_status
from llmservice_planner.sizing.prediction_error import Prediction


@dataclass(frozen=True, slots=True)
class PodReports:
    """What the pods of a service report in a pass."""

    load: Load | None = None
    """None where no pod could be read."""
    fetching: Fetching | None = None
    """The downloads of the model, if any."""
    adapters: Mapping[str, Sequence[PodAdapter]] = field(default_factory=dict)
    """Of the serving pods, by pod."""
    predictions: Sequence[Prediction] = ()
    """What was predicted of the pods and what they measured."""
    cold_start: ColdStart | None = None
    """Of the first pod after zero, in the pass that first sees it ready."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the status says of other objects in the cluster."""

    name_holder: str | None = None
    """The namespace that the gateway routes the served name to."""
    gateway_signs: bool = False
    """Whether the gateway has API keys, and signs what it sends on."""
    pool: Manifest | None = None
    """The service's InferencePool."""
    pools_installed: bool = False
    """Whether the cluster serves that kind."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass found out and did."""

    sizing: Sized | SizingProblem
    reports: PodReports
    decision: Decision
    current: int
    """Replicas that the Deployment was set to before the pass."""
    slo: Verdict
    """Whether the target can be met."""
    refusals: Sequence[Refusal] = ()
    """The children that could not be applied."""
    scaling: ScalingState | None = None
    """The autoscaler's after the pass, its history in seconds since 1970; None without autoscaling."""
    startup_s: float | None = None
    settling: bool = False
    """Whether the Deployment was changed a moment ago and Kubernetes has not observed it yet."""
    surroundings: Surroundings = Surroundings()
    allowance: WriteAllowance = UNLIMITED

    @property
    def is_held(self) -> bool:
        """Whether the Deployment was left as it is."""
        return isinstance(self.sizing, SizingProblem) or any(one.kind == "Deployment" for one in self.refusals)

    @property
    def desired(self) -> int:
        """Replicas that the Deployment is set to after the pass."""
        return self.current if self.is_held else self.decision.replicas

    @property
    def blocked(self) -> Trouble | None:
        """All refusals as one, under the first one's reason."""
        if not self.refusals:
            return None
        return Trouble(self.refusals[0].trouble.reason, "; ".join(one.trouble.message for one in self.refusals))

    @property
    def unreachable(self) -> bool:
        """Whether no request can be served for a refusal."""
        return any(one.kind in {"Deployment", "Service"} for one in self.refusals)

    def resumes(self, service: LLMService) -> bool:
        """Whether the scaling part of the status is kept as this process found it."""
        past, known = service.status.condition(SCALING_ACTIVE), service.status.autoscaling
        if past is None or known is None or past.observed_generation != service.metadata.generation:
            return False
        return self.allowance.resuming and known.desired_replicas == self.desired


def expected_status(
    service: LLMService, deployment: Manifest | None, pods: Sequence[Pod], outcome: Outcome, now: float
) -> LLMServiceStatus:
    """The whole status. The same observations give the same status, so that nothing is rewritten without a change."""
    status, generation = service.status, service.metadata.generation
    sizing, reports = outcome.sizing, outcome.reports
    live = [pod for pod in pods if not pod.terminating]
    if isinstance(sizing, SizingProblem):  # pods that serve an earlier spec keep the figures that they started with
        model, sized = status.model, status.sizing
    else:
        model = model_status(service.spec.model, sizing.model, reports.fetching, _model_code(service, reports.load))
        sized = sizing_status(sizing, _measured(service, deployment, pods, sizing, outcome))
        sized = sized and _with_predictions(sized, service, sizing, outcome)
    return LLMServiceStatus(
        observed_generation=generation,
        replicas=len(live),
        ready_replicas=sum(pod.serves for pod in live),
        selector=labels.selector(service.name),
        url=service_url(service),
        model=model,
        sizing=sized,
        autoscaling=_autoscaling(service, outcome, now),
        adapters=_adapters(service, reports.adapters),
        conditions=conditions(status.conditions, _verdicts(service, deployment, live, outcome), generation, now),
    )


def _verdicts(
    service: LLMService, deployment: Manifest | None, pods: Sequence[Pod], outcome: Outcome
) -> list[Verdict | Condition]:
    sizing, blocked, reports, cluster = outcome.sizing, outcome.blocked, outcome.reports, outcome.surroundings
    held_up = blocked if outcome.unreachable else None
    autoscaled = service.spec.autoscaling is not None
    ready = ready_verdict(
        deployment, outcome.desired, pods, sizing, held_up, autoscaled=autoscaled, decision=outcome.decision
    )
    progressing = progressing_verdict(deployment, outcome.desired, pods, sizing, blocked)
    pool = inference_pool_verdict(cluster.pool, installed=cluster.pools_installed)
    found = [
        _settled(service, while_fetching(ready, reports.fetching, service.spec.model.uri), outcome),
        progressing,
        stalled_verdict(ready, progressing),
        sizing_verdict(sizing),
        _scaling(service, pods, outcome),
        outcome.slo,
        name_verdict(service.served_name, service.namespace, cluster.name_holder),
        access_verdict(service.spec.access) if cluster.gateway_signs else None,
        _degraded(service, reports.load),
        adapters_verdict(service.spec.adapters, reports.adapters),
        pool if service.spec.gateway.inference_pool else None,
    ]
    return [one for one in found if one is not None]


def _adapters(service: LLMService, reports: Mapping[str, Sequence[PodAdapter]]) -> list[AdapterStatus]:
    found = []
    for adapter in service.spec.adapters:
        versions = [
            one.version
            for report in reports.values()
            for one in report
            if (one.name, one.uri, one.error) == (adapter.name, adapter.uri, None)
        ]
        found.append(
            AdapterStatus(
                name=adapter.name, pods=pods_with(adapter, reports), version=versions[0] if versions else None
            )
        )
    return found


def _settled(service: LLMService, ready: Verdict, outcome: Outcome) -> Verdict | Condition:
    """A service that serves stays Ready for the moment that Kubernetes takes to observe a change.

    Until then the condition keeps the generation before.
    """
    past = service.status.condition(ready.type)
    keeps = ready.reason == UPDATING and outcome.settling
    return past if keeps and past is not None and past.status == "True" else ready


def _degraded(service: LLMService, load: Load | None) -> Verdict | Condition | None:
    """None where it is not; what the status said where no pod could be read."""
    return service.status.condition(DEGRADED) if load is None else degraded_verdict(load)


def _scaling(service: LLMService, pods: Sequence[Pod], outcome: Outcome) -> Verdict | Condition:
    past = service.status.condition(SCALING_ACTIVE)
    if past is not None and outcome.resumes(service):
        return past
    autoscaled = service.spec.autoscaling is not None
    return scaling_verdict(outcome.decision, pods, outcome.sizing, autoscaled=autoscaled)


def _measured(
    service: LLMService, deployment: Manifest | None, pods: Sequence[Pod], sizing: Sized, outcome: Outcome
) -> MeasuredStatus | None:
    if sizing.plan is None:
        return None
    unchanged = service.status.observed_generation == service.metadata.generation
    before = service.status.sizing.measured if service.status.sizing and unchanged else None
    load, blocks = outcome.reports.load, measured_blocks(outcome.reports.load, pods, deployment)
    if load is None or blocks is None:
        return before
    forecast = outcome.decision.forecast
    tokens = expected_tokens(before.expected_tokens if before else None, forecast, outcome.allowance)
    return measured_status(sizing, blocks, load.weights_bytes, tokens)


def _with_predictions(sized: SizingStatus, service: LLMService, sizing: Sized, outcome: Outcome) -> SizingStatus:
    """What the status said of an unchanged spec stays, where pods could not be read."""
    unchanged = service.status.observed_generation == service.metadata.generation
    before = service.status.sizing if unchanged else None
    now = max_num_seqs_now(service.spec, sizing, sized.measured.blocks if sized.measured else None)
    return sized.model_copy(
        update={
            "predictions": predictions_status(outcome.reports.predictions, before.predictions if before else []),
            "max_num_seqs_measured": now[0] if now else None,
        }
    )


def _model_code(service: LLMService, load: Load | None) -> str | None:
    """As the pods report it; what the status said of the same model where none could be read."""
    if load is not None and load.model_code:
        return load.model_code
    before, source = service.status.model, service.spec.model
    return before.code if before and is_of(before, source) else None


def _autoscaling(service: LLMService, outcome: Outcome, now: float) -> AutoscalingStatus:
    """Load figures for every service; decisions and signals only where the operator decides."""
    load, scaling, allowance = outcome.reports.load, outcome.scaling, outcome.allowance
    policy = scale_policy(service, outcome.sizing)
    before = service.status.autoscaling or AutoscalingStatus(desired_replicas=outcome.desired)
    waiting = round(load.waiting / len(load.pods), 1) if load else None
    resumes = outcome.resumes(service)
    decides = service.spec.autoscaling is not None and isinstance(outcome.sizing, Sized) and not resumes
    log, capacity = before.decisions, scaling.history.capacity if scaling else None
    correction = scaling.history.correction_at(now) if scaling else 1.0
    most = service.spec.autoscaling.max_gpu_hours_per_day if service.spec.autoscaling else None
    return AutoscalingStatus(
        desired_replicas=outcome.desired,
        queue_depth=throttled(before.queue_depth, waiting, allowance),
        ttft_p99_seconds=throttled(before.ttft_p99_seconds, rounded(load.ttft_p99_s if load else None), allowance),
        startup_seconds=math.ceil(outcome.startup_s) if outcome.startup_s is not None else None,
        last_cold_start=_cold_start(outcome.reports.cold_start) or before.last_cold_start,
        demand=before.demand if resumes else demand_status(before.demand, outcome.decision.forecast, allowance),
        gpu_hours=gpu_hours_status(before.gpu_hours, scaling.gpu_hours if scaling else None, most),
        capacity=before.capacity if resumes else capacity_status(before.capacity, capacity, correction),
        signals=signals_status(service.key, load, policy, capacity and capacity[1], before.signals, allowance)
        if policy
        else [],
        decisions=log_decision(log, outcome.decision, now) if decides else log,
    )


def _cold_start(start: ColdStart | None) -> ColdStartStatus | None:
    if start is None:
        return None
    parts = {name: round(seconds, 1) for name, seconds in start.phases().items() if name != "total"}
    return ColdStartStatus(ready_at=rfc3339(start.ready_s), seconds=round(sum(parts.values()), 1), **parts)


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) from `before` to `after`: empty where equal, null where a key goes away."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key in before and before[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping):
            patch[key] = merge_patch(before[key], value)
        else:
            patch[key] = value
    return patch


class InvalidSpecError(Exception):
    """A spec that the API server accepted under another version of the CRD. The message names each wrong field."""

    def __init__(self, manifest: Manifest, error: ValidationError) -> None:
        fields = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
        super().__init__("; ".join(fields))
        self.manifest = manifest


def parse_service(manifest: Manifest) -> LLMService:
    """Raises InvalidSpecError. An invalid status is ignored, and written anew by the pass."""
    try:
        return LLMService.model_validate(manifest)
    except ValidationError:
        pass
    try:
        return LLMService.model_validate({key: value for key, value in manifest.items() if key != "status"})
    except ValidationError as error:
        raise InvalidSpecError(manifest, error) from error


def invalid_spec_status(error: InvalidSpecError, now: float) -> tuple[list[Condition], dict[str, Any]]:
    """The conditions, and what to change in the status, empty where it is right already.

    Running pods are left alone, figures stay.
    """
    raw = error.manifest.get("status") or {}
    try:
        before = LLMServiceStatus.model_validate(raw).conditions
    except ValidationError:
        before = []
    reason, message = "InvalidSpec", f"the spec does not fit this operator's CRD, correct it: {error}"
    verdicts = [Verdict(kind, "False", reason, message) for kind in (READY, PROGRESSING, SIZING_VALID)]
    verdicts.append(Verdict(STALLED, "True", reason, message))
    verdicts += [Verdict(kind, "Unknown", reason, "the spec comes first") for kind in (SCALING_ACTIVE, SLO_FEASIBLE)]
    generation = int(error.manifest["metadata"].get("generation", 1))
    after = conditions(before, verdicts, generation, now)
    return after, merge_patch(
        {key: raw.get(key) for key in ("observedGeneration", "conditions")},
        {"observedGeneration": generation, "conditions": [one.model_dump(by_alias=True) for one in after]},
    )
