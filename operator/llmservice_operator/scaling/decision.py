"""How many replicas: load → analyse → optimise → limit → a decision with its reasons.

Every step is a pure function; time comes in as seconds of a monotonic clock. The queue and the arrivals set the
number. p99 TTFT only tilts it, by one more while the target is missed and never down meanwhile, and only where the
load explains it: it lags behind the load. Completions alone are never used, since an overload caps them. A service at
zero has no pods to measure: the requests that gateways hold for it are its queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmservice_operator.api.resource import LLMService
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import Held, Load
from llmservice_operator.scaling.policy import TARGET_UTILIZATION, ScalePolicy
from llmservice_operator.scaling.supply import Supply
from llmservice_operator.sizing import Sized, SizingProblem

TTFT_VETO = 0.8
"""No replica is removed while p99 TTFT is above this share of the target."""
TTFT_ENOUGH = 20
"""Requests in the window from which p99 TTFT can ask for a replica: of fewer it is the slowest one alone."""
TTFT_EXPLAINED = 0.5
"""Share of the slots in use from which running requests may delay the next one's first token."""
MISSING = 0.1
"""Share of the ready pods whose metrics may be missing when a replica is removed: those may be the busy ones."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to set, and why."""

    replicas: int
    wanted: int
    """The recommendation within the user's bounds, before stabilisation."""
    reasons: tuple[str, ...]
    active: bool = True
    """False without metrics."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the autoscaler of a service keeps from one pass to the next."""

    history: History
    generation: int
    """Of the spec that the history was made under."""


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
    feasible: bool = True,
) -> tuple[Decision, ScalingState | None]:
    """The Deployment's replicas from now on, and the next pass's state.

    `load` is that of the ready pods, or what gateways hold for a service without any; None where it is unknown. `now`
    is the clock of the status, `steady_s` a monotonic one. `feasible`: whether replicas can help p99 TTFT.
    """
    if isinstance(sizing, SizingProblem):
        reason = f"sizing: {sizing.reason}, replicas stay"
        return Decision(supply.replicas, supply.replicas, (reason,), active=False), state
    policy = scale_policy(service, sizing)
    if policy is None:
        fixed = service.spec.replicas
        return Decision(fixed, fixed, (f"spec.replicas is {fixed}",)), None
    if state is None:
        history = History.resume(service.status.autoscaling, supply.replicas, now).shifted(steady_s - now)
        state = ScalingState(history, service.status.observed_generation)
    generation = service.metadata.generation
    history = state.history if state.generation == generation else state.history.forget_capacity()
    if policy.sleeps and supply.replicas == 0:
        held = load if isinstance(load, Held) else None
        decision, history = decide_wake_up(held, _policy_at_zero(policy, sizing, held), history, steady_s)
    else:
        measured = None if isinstance(load, Held) else load
        decision, history = decide(measured, supply, policy, history, steady_s, feasible=feasible)
    return decision, ScalingState(history, generation)


def decide(
    load: Load | None, supply: Supply, policy: ScalePolicy, history: History, now: float, *, feasible: bool = True
) -> tuple[Decision, History]:
    """One tick of the autoscaler. Without metrics the replicas are held, which is no recommendation."""
    history = history.observe(now, supply.replicas)
    if load is None:
        return _hold(supply, policy), history.remember(now, None, policy.memory_s)
    history = history.measure(now, load.capacity_per_s, load.finished_per_s, load.quiet_s)
    policy = policy.for_load(load)
    counted = policy.counted(load)
    analysis = analyse(counted, _slots(load, policy), supply, policy, history.capacity_per_s(now))
    recommendation = optimise(analysis, counted, supply, policy, history, now, feasible=feasible)
    recommendation = _keep_last(recommendation, policy, history)
    decision = limit(recommendation, supply.replicas, policy, history, now)
    if decision.replicas < supply.replicas and load.answered < 1 - MISSING:
        decision = _hold_for_missing(decision, load, supply, policy)
    return decision, history.remember(now, decision.wanted, policy.memory_s)


def _policy_at_zero(policy: ScalePolicy, sizing: Sized, held: Held | None) -> ScalePolicy:
    """With the slots that one replica has for requests as long as those that are held.

    Without a size, how many fit is known once one replica runs.
    """
    if sizing.max_num_seqs is None:
        return replace(policy, max_replicas=1)
    if held is None or not held.tokens or sizing.plan is None or not sizing.plan.kv_bytes_per_token:
        return policy
    pool_tokens = sizing.plan.kv_pool_bytes // sizing.plan.kv_bytes_per_token
    return replace(policy, max_num_seqs=max(1, min(policy.max_num_seqs, pool_tokens * held.requests // held.tokens)))


def decide_wake_up(held: Held | None, policy: ScalePolicy, history: History, now: float) -> tuple[Decision, History]:
    """One tick of a service that the autoscaler has set to zero: held requests are its queue.

    A request is answered as soon as one replica is ready, so no stabilisation and no cooldown delays the first one; the
    step bounds how many more come with it. Until a pod is ready the replicas then stay: one scale-up for all requests.
    """
    history = history.observe(now, 0)
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
        reasons.append(f"bounds: {policy.min_replicas} to {policy.max_replicas} -> {wanted}")
    replicas = min(wanted, max(1, policy.up.size(0)))
    if replicas != wanted:
        reasons.append(f"step: {policy.up.about} -> {replicas}")
    return Decision(replicas, wanted, tuple(reasons)), history.remember(now, wanted, policy.memory_s)


def _keep_last(asked: Recommendation, policy: ScalePolicy, history: History) -> Recommendation:
    """The last replica is removed only once there has been no request for `idleTimeout`."""
    if not policy.sleeps:
        return asked
    if history.idle_s >= policy.idle_timeout_s:  # the window may still have arrivals of before
        reason = f"idle: no request for {policy.idle_timeout_s:g}s -> 0"
        return Recommendation(0, (*asked.reasons, reason))
    if asked.replicas:
        return asked
    reason = f"idle: the last replica stays until there is no request for {policy.idle_timeout_s:g}s -> 1"
    return Recommendation(1, (*asked.reasons, reason))


def _hold(supply: Supply, policy: ScalePolicy) -> Decision:
    replicas = policy.bounded(supply.replicas)
    why = "no metrics from any ready pod" if supply.ready else "no ready pod yet"
    return Decision(replicas, replicas, (f"{why}: holding at {replicas}",), active=False)


def _hold_for_missing(decision: Decision, load: Load, supply: Supply, policy: ScalePolicy) -> Decision:
    total = len(load.missing) + len(load.pods)
    reason = f"hold: metrics of {len(load.missing)} of {total} ready pods are missing, not shrinking"
    return replace(decision, replicas=policy.bounded(supply.replicas), reasons=(*decision.reasons, reason))


@dataclass(frozen=True, slots=True)
class Analysis:
    """The load in units of replicas; None where it is unknown."""

    queue: float | None
    """Replicas that hold what is in flight with at most `queue_depth` waiting each, soon; None without a queue."""
    utilization: float
    """Replicas that hold what runs at 80 % of their slots, or of their KV cache where that is fuller."""
    arrivals: float | None
    """Replicas that keep up with the arrivals at 80 % of a replica's capacity."""
    capacity_per_s: float | None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What the load asks for, before bounds and time."""

    replicas: int
    reasons: tuple[str, ...] = ()


def analyse(load: Load, slots: float, supply: Supply, policy: ScalePolicy, capacity_per_s: float | None) -> Analysis:
    """Put the load into units of replicas; pods whose metrics are missing are assumed to be like the others.

    `slots` is what one replica really runs at once. A queue asks for the replicas that hold all that is in flight, or
    for those that finish it in the time that a new one takes to start, whichever are fewer: any more would be idle by
    the time that they serve.
    """
    utilization = _busy(load, policy) / TARGET_UTILIZATION
    waiting = load.waiting / load.answered
    queue = (load.running / load.answered + waiting) / (slots + policy.queue_depth)
    arrivals = None
    if capacity_per_s is not None and load.arrivals_per_s is not None:
        arrivals_per_s = load.arrivals_per_s / load.answered
        arrivals = arrivals_per_s / (capacity_per_s * TARGET_UTILIZATION)
        to_do = arrivals_per_s * supply.lead_s + waiting
        queue = min(queue, to_do / (capacity_per_s * supply.lead_s + policy.queue_depth))
        if load.waiting:  # pods that have a queue are full, however few of them are needed
            utilization = min(utilization, supply.replicas)
    if supply.trouble is not None:  # a queue that grows because pods can't start
        queue = min(queue, supply.replicas)
    return Analysis(queue if load.waiting else None, utilization, arrivals, capacity_per_s)


def _busy(load: Load, policy: ScalePolicy) -> float:
    """Full pods that hold what runs, by slots or by KV cache, whichever is fuller."""
    return sum(max(pod.running / policy.max_num_seqs, pod.kv_usage) for pod in load.pods) / load.answered


def _slots(load: Load, policy: ScalePolicy) -> float:
    """What one replica really runs at once: fewer than its slots where long requests fill the KV cache first."""
    full = [pod.running for pod in load.pods if pod.waiting and pod.kv_usage >= TARGET_UTILIZATION]
    return min(policy.max_num_seqs, max(1.0, sum(full) / len(full))) if full else policy.max_num_seqs


def optimise(
    analysis: Analysis,
    load: Load,
    supply: Supply,
    policy: ScalePolicy,
    history: History,
    now: float,
    *,
    feasible: bool,
) -> Recommendation:
    """The number of replicas that the load asks for: the largest of what each signal asks for."""
    signals = [
        (
            analysis.queue,
            f"queue: {load.waiting:.0f} waiting, {load.running:.0f} running, {policy.queue_depth} may wait per replica",
        ),
        (
            analysis.utilization,
            f"slots: {load.running:.0f} running, {policy.max_num_seqs} per replica, used to {TARGET_UTILIZATION:.0%}",
        ),
    ]
    if analysis.arrivals is not None:
        rates = f"{load.arrivals_per_s:.2f}/s, one replica finishes {analysis.capacity_per_s:.2f}/s"
        signals.append((analysis.arrivals, f"arrivals: {rates}"))
    largest = _largest(_rounded(raw, why, supply, policy) for raw, why in signals if raw is not None)
    recommendation = _replace_overdue(largest, supply, policy)
    if not feasible:
        return recommendation
    recommendation = _largest([recommendation, _ttft_bias(load, supply, policy, history, now)])
    return _veto(recommendation, load, supply, policy)


def _largest(signals: Iterable[Recommendation]) -> Recommendation:
    each = list(signals)
    return Recommendation(max(one.replicas for one in each), tuple(reason for one in each for reason in one.reasons))


def _rounded(raw: float, why: str, supply: Supply, policy: ScalePolicy) -> Recommendation:
    """Whole replicas; within the tolerance of the present number, the present number."""
    current = supply.counted
    near = current > 0 and abs(raw / current - 1) <= policy.tolerance
    replicas = current if near else math.ceil(raw)
    return Recommendation(replicas, (f"{why} -> {replicas}",))


def _replace_overdue(asked: Recommendation, supply: Supply, policy: ScalePolicy) -> Recommendation:
    """At most `stepReplicas` more for pods that do not start, since those that are added may not start either."""
    if not supply.overdue or asked.replicas <= supply.ready + supply.starting:
        return asked
    what = f"supply: {supply.overdue} pods are overdue"
    if supply.trouble is not None:
        return replace(asked, reasons=(*asked.reasons, f"{what}, {supply.trouble} would keep others as well"))
    replicas = asked.replicas + min(supply.overdue, max(1, policy.up.replicas))
    return Recommendation(replicas, (*asked.reasons, f"{what} and not counted on -> {replicas}"))


def _ttft_bias(load: Load, supply: Supply, policy: ScalePolicy, history: History, now: float) -> Recommendation:
    """One more while the load explains that the target is missed.

    The replica added last first has a window to show its effect, and its start-up time where there is a queue.
    """
    p99, target = load.ttft_p99_s, policy.ttft_p99_s
    if p99 is None or target is None or p99 <= target or not (load.waiting or load.running):
        return Recommendation(0)
    what = f"ttft: p99 {p99:.2f}s is above the target of {target:.2f}s"
    if load.ttft_count < TTFT_ENOUGH:
        return Recommendation(0, (f"{what}, of {load.ttft_count:.0f} requests: too few to tell",))
    if not _explains_ttft(load, supply.ready, policy):
        return Recommendation(0, (f"{what}: neither queue nor slots explain it, no replica would help",))
    effect_s = max(policy.window_s, supply.lead_s) if load.waiting else policy.window_s
    recent = history.last_up_s is not None and now - history.last_up_s < effect_s
    if supply.starting or supply.overdue or supply.trouble or recent:
        reason = f"{what}: waiting for the replicas just added -> {supply.replicas}"
        return Recommendation(supply.replicas, (reason,))
    return Recommendation(supply.replicas + 1, (f"{what} -> {supply.replicas + 1}",))


def _explains_ttft(load: Load, replicas: int, policy: ScalePolicy) -> bool:
    """Whether requests would wait for others on so many replicas, so that a replica more or less shows in TTFT."""
    queued = load.waiting / load.answered >= max(1, replicas) and load.running > 0
    return queued or _busy(load, policy) >= TTFT_EXPLAINED * replicas


def _veto(asked: Recommendation, load: Load, supply: Supply, policy: ScalePolicy) -> Recommendation:
    """No replica is removed while the target is nearly missed and those that stay would be busy."""
    target, p99 = policy.ttft_p99_s, load.ttft_p99_s
    close = target is not None and p99 is not None and p99 > target * TTFT_VETO
    if asked.replicas >= supply.replicas or not close or not _explains_ttft(load, asked.replicas, policy):
        return asked
    reason = f"hold: p99 TTFT {p99:.2f}s is close to the target of {target:.2f}s, not shrinking"
    return Recommendation(supply.replicas, (*asked.reasons, reason))


def limit(asked: Recommendation, current: int, policy: ScalePolicy, history: History, now: float) -> Decision:
    """Bound what may be reached, and how fast.

    Never above or below the user's bounds, which apply at once. Within them: shrinks only to the highest
    recommendation younger than the scale-down stabilisation, grows only to the lowest one younger than the scale-up
    stabilisation, and moves no further than the step that the period allows.
    """
    wanted = policy.bounded(asked.replicas)
    reasons = list(asked.reasons)
    if wanted != asked.replicas:
        reasons.append(f"bounds: {policy.min_replicas} to {policy.max_replicas} -> {wanted}")
    stable = _stabilized(wanted, current, policy, history, now)
    if stable != wanted:
        window_s = (policy.down if wanted < current else policy.up).stabilization_s
        reasons.append(f"stabilization: {wanted} must hold for {window_s:g}s -> {stable}")
    replicas = min(stable, policy.up.highest(current, history, now))
    replicas = max(replicas, policy.down.lowest(current, history, now))
    if replicas != stable:
        rules = policy.up if stable > current else policy.down
        if replicas == current and rules.cooldown_s:
            reasons.append(f"cooldown: no step within {rules.cooldown_s:g}s of a change -> {replicas}")
        else:
            reasons.append(f"step: {rules.about} -> {replicas}")
    return Decision(policy.bounded(replicas), wanted, tuple(reasons))


def _stabilized(wanted: int, current: int, policy: ScalePolicy, history: History, now: float) -> int:
    if wanted == 0:
        return 0  # `idleTimeout` is over, which is the stabilisation of the last replica
    if wanted < current:
        if history.unmeasured_s is not None and now - history.unmeasured_s < policy.down.stabilization_s:
            return current
        return min(current, max(wanted, *history.recommended_within(policy.down.stabilization_s, now), 0))
    if wanted > current:
        return max(current, min(wanted, *history.recommended_within(policy.up.stabilization_s, now), wanted))
    return wanted
