"""The status that a service should have, from what a pass observed and decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import (
    AutoscalingStatus,
    Condition,
    LLMServiceStatus,
    MeasuredStatus,
    ModelStatus,
    SignalStatus,
    SizingStatus,
)
from llmservice_operator.children.children import service_url
from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.pods.pod_model import Fetching
from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.scaling import Decision, ScalePolicy
from llmservice_operator.signals.load import Load
from llmservice_operator.signals.service_queries import ServiceQueries
from llmservice_operator.sizing.sizing import Sized, SizingProblem, measure, sizing_status
from llmservice_operator.status.conditions import (
    SCALING_ACTIVE,
    UPDATING,
    Verdict,
    conditions,
    name_verdict,
    progressing_verdict,
    ready_verdict,
    scaling_verdict,
    sizing_verdict,
    slo_verdict,
    stalled_verdict,
)
from llmservice_operator.status.decision_log import log_decision
from llmservice_operator.status.fetch_verdict import while_fetching
from llmservice_operator.status.model_status import model_status
from llmservice_operator.status.note_times import AT_ONCE, Noting
from llmservice_operator.status.signal_status import capacity_status, noted, noted_signals, rounded, signals_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass found out and did."""

    sizing: Sized | SizingProblem
    load: Load | None
    decision: Decision
    desired: int
    """Replicas that the Deployment is asked for after the pass."""
    feasibility: Feasibility | None = None
    startup_s: float | None = None
    blocked: Trouble | None = None
    """What kept the children from being applied."""
    unreachable: bool = True
    """Whether the Deployment or a Service is among them: without those nobody is served."""
    policy: ScalePolicy | None = None
    """What is scaled by; None without autoscaling."""
    drain: tuple[float, float] | None = None
    """(when, requests per second) that one full replica was last measured to finish."""
    fetching: Fetching | None = None
    """The downloads of the model, while there are some."""
    settling: bool = False
    """Whether Kubernetes was given a change a moment ago and has not taken it up yet."""
    name_holder: str | None = None
    """The namespace that the bare served name belongs to."""
    noting: Noting = AT_ONCE
    """What may be written of the load's figures."""

    def resumes(self, service: LLMService) -> bool:
        """Whether what the status says of the scaling stands as this process found it."""
        past, known = service.status.condition(SCALING_ACTIVE), service.status.autoscaling
        if past is None or known is None or past.observed_generation != service.metadata.generation:
            return False
        return self.noting.resuming and known.desired_replicas == self.desired


def expected_status(
    service: LLMService, deployment: Manifest | None, pods: Sequence[Pod], outcome: Outcome, now: float
) -> LLMServiceStatus:
    """The whole status. The same observations give the same status, so that nothing is rewritten without a change."""
    live = [pod for pod in pods if not pod.terminating]
    return LLMServiceStatus(
        observed_generation=service.metadata.generation,
        replicas=len(live),
        ready_replicas=sum(pod.serves for pod in live),
        selector=labels.selector(service.name),
        url=service_url(service),
        model=_model(service, outcome),
        sizing=_sizing(service, outcome),
        autoscaling=_autoscaling(service, live, outcome, now),
        conditions=conditions(
            service.status.conditions,
            _verdicts(service, deployment, live, outcome),
            service.metadata.generation,
            now,
        ),
    )


def _verdicts(
    service: LLMService, deployment: Manifest | None, pods: Sequence[Pod], outcome: Outcome
) -> list[Verdict | Condition]:
    sizing, blocked = outcome.sizing, outcome.blocked
    ready = ready_verdict(deployment, outcome.desired, pods, sizing, blocked if outcome.unreachable else None)
    taken = name_verdict(service.served_name, service.namespace, outcome.name_holder)
    progressing = progressing_verdict(deployment, outcome.desired, pods, sizing, blocked)
    return [
        _settled(service, while_fetching(ready, outcome.fetching, service.spec.model.uri), outcome),
        progressing,
        stalled_verdict(ready, progressing),
        sizing_verdict(sizing),
        _scaling(service, pods, outcome),
        slo_verdict(outcome.feasibility),
        *([taken] if taken else []),
    ]


def _settled(service: LLMService, ready: Verdict, outcome: Outcome) -> Verdict | Condition:
    """What serves does not become unready for the moment that Kubernetes takes to notice a change: until then the
    condition goes on speaking of the generation before."""
    past = service.status.condition(ready.type)
    keeps = ready.reason == UPDATING and outcome.settling and past is not None and past.status == "True"
    return past if keeps and past is not None else ready


def _scaling(service: LLMService, pods: Sequence[Pod], outcome: Outcome) -> Verdict | Condition:
    past = service.status.condition(SCALING_ACTIVE)
    if past is not None and outcome.resumes(service):
        return past
    autoscaled = service.spec.autoscaling is not None
    return scaling_verdict(outcome.decision, pods, outcome.sizing, autoscaled=autoscaled)


def _model(service: LLMService, outcome: Outcome) -> ModelStatus | None:
    """Like the sizing, it keeps speaking about the model that runs."""
    if isinstance(outcome.sizing, SizingProblem):
        return service.status.model
    return model_status(service.spec.model, outcome.sizing.model, outcome.fetching)


def _sizing(service: LLMService, outcome: Outcome) -> SizingStatus | None:
    """Pods that serve an earlier spec keep the figures that they were started with."""
    if isinstance(outcome.sizing, SizingProblem):
        return service.status.sizing
    return sizing_status(outcome.sizing, _measured(service, outcome.sizing, outcome.load))


def _measured(service: LLMService, sizing: Sized, load: Load | None) -> MeasuredStatus | None:
    if sizing.plan is None:
        return None
    if load is not None and load.kv_blocks:
        return measure(sizing, load.kv_blocks, load.weights_bytes)
    before = service.status.sizing
    unchanged = service.status.observed_generation == service.metadata.generation
    return before.measured if before and unchanged else None


def _autoscaling(service: LLMService, pods: Sequence[Pod], outcome: Outcome, now: float) -> AutoscalingStatus:
    """Load figures for every service; decisions and signals only where the operator is the one who decides."""
    load, noting = outcome.load, outcome.noting
    before = service.status.autoscaling or AutoscalingStatus(desired_replicas=outcome.desired)
    waiting = round(load.waiting / len(load.pods), 1) if load else None
    resumes = outcome.resumes(service)
    decides = service.spec.autoscaling is not None and isinstance(outcome.sizing, Sized) and not resumes
    log = before.decisions
    return AutoscalingStatus(
        desired_replicas=outcome.desired,
        queue_depth=noted(before.queue_depth, waiting, noting),
        ttft_p99_seconds=noted(before.ttft_p99_seconds, rounded(load.ttft_p99_s if load else None), noting),
        startup_seconds=math.ceil(outcome.startup_s) if outcome.startup_s is not None else None,
        capacity=before.capacity if resumes else capacity_status(before.capacity, outcome.drain),
        signals=_signals(service, before, outcome),
        decisions=log_decision(log, outcome.decision, now) if decides else log,
    )


def _signals(service: LLMService, before: AutoscalingStatus, outcome: Outcome) -> list[SignalStatus]:
    if outcome.policy is None:
        return []
    counts_batch = outcome.policy.batch == "scale"
    queries = ServiceQueries(service.namespace, service.name, outcome.policy.window_s, counts_batch)
    drain_per_s = None if outcome.drain is None else outcome.drain[1]
    present = signals_of(outcome.load, outcome.policy, drain_per_s, queries)
    return noted_signals(before.signals, present, outcome.noting)
