"""How many replicas: load → analyse → optimise → limit → a decision with its reasons.

Every step is a pure function; time comes in as seconds of a monotonic clock. What arrives, and what will arrive by the
time that a new replica serves, sets the number; the queue and the running requests correct it. p99 TTFT only tilts it,
by one more while the target is missed and never down meanwhile, and only where the load explains it: it lags behind the
load. Completions alone are never used, since an overload caps them. A service at zero has no pods to measure: the
requests that gateways hold for it are its queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.status import AutoscalingStatus
from llmservice_operator.pods.pod import epoch
from llmservice_operator.scaling.analysis import analyse, used_slots
from llmservice_operator.scaling.capacity import ReplicaModel
from llmservice_operator.scaling.demand import mean
from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.forecast import Forecast, forecast_of, work_done
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.limits import Decision, limit
from llmservice_operator.scaling.load import Held, Load
from llmservice_operator.scaling.policy import LONGEST_STABILIZATION_S, ScalePolicy
from llmservice_operator.scaling.recommendation import keep_last, optimise
from llmservice_operator.scaling.schedule import GpuHours, policy_at
from llmservice_operator.scaling.supply import Supply
from llmservice_operator.sizing import Sized, SizingProblem

__all__ = ["Decision", "ScalingState", "decide", "decide_replicas", "decide_wake_up", "scale_policy"]

MISSING = 0.1
"""Share of the ready pods whose metrics may be missing when a replica is removed: those may be the busy ones."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the autoscaler of a service keeps from one pass to the next."""

    history: History
    generation: int
    """Of the spec that the history was made under."""
    gpu_hours: GpuHours

    def shifted(self, by_s: float) -> ScalingState:
        """The same on another clock."""
        return replace(self, history=self.history.shifted(by_s))


def gpu_hours_of(status: AutoscalingStatus | None, now: float) -> GpuHours:
    """What the status kept; from now on where it has none."""
    known = status.gpu_hours if status else None
    return GpuHours.start(now) if known is None else GpuHours(known.day, known.hours, min(now, epoch(known.counted_at)))


def scale_policy(service: LLMService, sizing: Sized | SizingProblem) -> ScalePolicy | None:
    """The policy of the built-in autoscaler; None where there is none, or nothing that it could scale."""
    autoscaling = service.spec.autoscaling
    if autoscaling is None or isinstance(sizing, SizingProblem):
        return None
    return ScalePolicy.of(autoscaling, service.spec.slo, sizing.max_num_seqs or 1)


def decide_replicas(
    service: LLMService,
    sizing: Sized | SizingProblem,
    load: Load | Held | None,
    supply: Supply,
    state: ScalingState | None,
    now: float,
    steady_s: float,
    *,
    slo: Feasibility | None = None,
) -> tuple[Decision, ScalingState | None]:
    """The Deployment's replicas from now on, and the next pass's state.

    `load` is that of the ready pods, or what gateways hold for a service without any; None where it is unknown. `now`
    is the clock of the status, `steady_s` a monotonic one. `slo`: what `feasibility_of` found; None: not known.
    """
    if isinstance(sizing, SizingProblem):
        reason = f"sizing: {sizing.reason}, replicas stay"
        return Decision(supply.replicas, supply.replicas, (reason,), active=False), state
    policy, autoscaling = scale_policy(service, sizing), service.spec.autoscaling
    if policy is None or autoscaling is None:
        fixed = service.spec.replicas
        return Decision(fixed, fixed, (f"spec.replicas is {fixed}",), slo=slo), None
    if state is None:
        history = History.resume(service.status.autoscaling, supply.replicas, now).shifted(steady_s - now)
        state = ScalingState(history, service.status.observed_generation, gpu_hours_of(service.status.autoscaling, now))
    generation = service.metadata.generation
    spent, gpus = state.gpu_hours, service.spec.gpus
    spent = spent.after(supply.replicas, gpus, now)
    policy = policy_at(policy, autoscaling.schedule, autoscaling.max_gpu_hours_per_day, spent, gpus)
    history = state.history if state.generation == generation else state.history.forget_capacity()
    if policy.sleeps and supply.replicas == 0:
        held = load if isinstance(load, Held) else None
        decision, history = decide_wake_up(held, _policy_at_zero(policy, sizing, held), history, steady_s)
    else:
        measured = None if isinstance(load, Held) else load
        kv_blocks = measured.kv_blocks if measured else None
        model = ReplicaModel.of(sizing, service.spec.slo, kv_blocks)
        feasible = slo is None or slo.replicas_help
        decision, history = decide(measured, supply, policy, history, steady_s, feasible=feasible, model=model)
    return replace(decision, slo=slo), ScalingState(history, generation, spent)


def decide(
    load: Load | None,
    supply: Supply,
    policy: ScalePolicy,
    history: History,
    now: float,
    *,
    feasible: bool = True,
    model: ReplicaModel | None = None,
) -> tuple[Decision, History]:
    """One tick of the autoscaler. Without metrics the replicas are held, which is no recommendation.

    `feasible`: whether replicas can help p99 TTFT.
    """
    history = history.observe(now, supply.replicas)
    if load is None:
        return _hold(supply, policy), history.remember(now, None, policy.memory_s)
    is_bursty = history.burst_s is not None and now - history.burst_s < LONGEST_STABILIZATION_S
    down = policy.down.with_start(supply.lead_s, is_bursty=is_bursty)
    policy = replace(policy.for_load(load), down=down)
    counted = policy.counted(load)
    history = history.arrived(now, counted.demand and counted.demand.scaled(1 / load.answered))
    history = history.measure(now, load.capacity_per_s, load.finished_per_s, load.quiet_s)
    # Work is of all lanes, the demand is of those that count: with batch requests they can't be compared.
    if model is not None and history.demands and counted is load:
        typical = mean([demand for _, demand in history.demands])
        history = history.corrected(now, *work_done(load, model, typical))
    forecast = forecast_of(counted, supply, policy, history, model, now)
    if forecast is not None and forecast.is_burst:
        history = replace(history, burst_s=now)
    slots = used_slots(load, policy)
    analysis = analyse(counted, slots, supply, policy, history.capacity_per_s(now), forecast)
    recommendation = optimise(analysis, counted, supply, policy, history, now, feasible=feasible)
    recommendation = keep_last(recommendation, policy, history)
    has_trend = forecast is not None and forecast.trend is not None
    at_once = has_trend or (history.burst_s is not None and now - history.burst_s < policy.window_s)
    decision = limit(recommendation, supply.replicas, policy, history, now, at_once=at_once)
    if decision.replicas < supply.replicas and (why := _why_not_fewer(load, forecast)) is not None:
        reasons = (*decision.reasons, f"hold: {why}, not shrinking")
        decision = replace(decision, replicas=policy.bounded(supply.replicas), reasons=reasons)
    history = history.remember(now, decision.wanted, policy.memory_s + supply.lead_s)
    return replace(decision, forecast=forecast), history


def _policy_at_zero(policy: ScalePolicy, sizing: Sized, held: Held | None) -> ScalePolicy:
    """With the slots that one replica has for requests as long as those that are held.

    Without a size, how many fit is known once one replica runs.
    """
    if sizing.max_num_seqs is None:
        return replace(policy, max_replicas=min(policy.max_replicas, 1))
    groups = sizing.block_groups
    if held is None or not held.tokens or sizing.plan is None or groups is None:
        return policy
    fit = (sizing.plan.num_blocks - 1) // groups.blocks(math.ceil(held.tokens / held.requests))
    return replace(policy, max_num_seqs=max(1, min(policy.max_num_seqs, fit)))


def decide_wake_up(held: Held | None, policy: ScalePolicy, history: History, now: float) -> tuple[Decision, History]:
    """One tick of a service that the autoscaler has set to zero: held requests are its queue.

    A request is answered as soon as one replica is ready, so no stabilisation and no cooldown delays the first one; the
    step bounds how many more come with it. Until a pod is ready the replicas then stay: one scale-up for all requests.
    """
    history = history.observe(now, 0)
    if policy.max_replicas == 0:  # also without a request, since the gateway is to hold none
        return Decision(0, 0, (policy.bound_reason(1, 0),)), history.remember(now, 0, policy.memory_s)
    if held is None:
        reason = "held: no gateway answers, so no request can start a replica -> 0"
        return Decision(0, 0, (reason,), active=False), history.remember(now, None, policy.memory_s)
    history = history.measure(now, None)
    if not held.requests:
        return Decision(0, 0, ("held: no request -> 0",)), history.remember(now, 0, policy.memory_s)
    capacity_per_s = history.capacity_per_s(now)
    waiting = Load("gateways", (), held=held.requests)
    analysis = analyse(waiting, policy.max_num_seqs, Supply(0, 0), policy, capacity_per_s)
    asked = max(1, math.ceil(analysis.queue or 0))
    room = f"a replica runs {policy.max_num_seqs} of them, {policy.queue_depth} may wait"
    reasons = [f"held: {held.requests} requests of {held.tokens} tokens wait in gateways, {room} -> {asked}"]
    wanted = policy.bounded(asked)
    if wanted != asked:
        reasons.append(policy.bound_reason(asked, wanted))
    replicas = min(wanted, max(1, policy.up.size(0)))
    if replicas != wanted:
        reasons.append(f"step: {policy.up.about} -> {replicas}")
    return Decision(replicas, wanted, tuple(reasons)), history.remember(now, wanted, policy.memory_s)


def _hold(supply: Supply, policy: ScalePolicy) -> Decision:
    replicas = policy.bounded(supply.replicas)
    why = "no metrics from any ready pod" if supply.ready else "no ready pod yet"
    return Decision(replicas, replicas, (f"{why}: holding at {replicas}",), active=False)


def _why_not_fewer(load: Load, forecast: Forecast | None) -> str | None:
    if load.answered < 1 - MISSING:
        total = len(load.missing) + len(load.pods)
        return f"metrics of {len(load.missing)} of {total} ready pods are missing"
    if forecast is None or not forecast.may_grow:
        return None
    return "the load grows" if forecast.trend is not None else "the load may be growing"
