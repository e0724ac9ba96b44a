"""How many replicas: signals → analyse → optimise → limit → a decision with its reasons.

Every step is a plain function of what it is given; time comes in as seconds of a monotonic clock. The queue and the
arrivals drive the number. p99 TTFT only tilts it, one up while the promise is broken and never down meanwhile: it lags
behind the load and then falls off a cliff. Completions alone are never used, since an overload caps them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmservice_operator.api import duration
from llmservice_operator.api.spec import Autoscaling, Slo
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.step import ScaleStep, highest, lowest
from llmservice_operator.signals.load import Load

TARGET_UTILIZATION = 0.8
"""Waits explode beyond it (queueing theory): plan for this share of the slots, not for all of them."""
CAPACITY_KEEP_S = 3600.0
"""How long a measured capacity counts. It is measured only while a replica is full: forgotten sooner, a service that
just fits would be shrunk, overloaded and measured again in turn; kept for ever, it would outlive the traffic it was of.
"""
TTFT_VETO = 0.8
"""No replica is removed while p99 TTFT is above this share of the promise."""


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """What the user allows and promises."""

    min_replicas: int
    max_replicas: int
    queue_depth: int
    tolerance: float
    up_stabilization_s: float
    down_stabilization_s: float
    up_step: ScaleStep
    down_step: ScaleStep
    window_s: float
    ttft_p99_s: float | None
    max_num_seqs: int
    """Slots of one replica."""

    @classmethod
    def of(cls, autoscaling: Autoscaling, slo: Slo, max_num_seqs: int) -> ScalePolicy:
        return cls(
            min_replicas=autoscaling.min_replicas,
            max_replicas=autoscaling.max_replicas,
            queue_depth=autoscaling.queue_depth,
            tolerance=autoscaling.tolerance_percent / 100,
            up_stabilization_s=duration.seconds(autoscaling.scale_up.stabilization),
            down_stabilization_s=duration.seconds(autoscaling.scale_down.stabilization),
            up_step=ScaleStep.of(autoscaling.scale_up),
            down_step=ScaleStep.of(autoscaling.scale_down),
            window_s=duration.seconds(autoscaling.metrics.window),
            ttft_p99_s=duration.seconds(slo.ttft_p99) if slo.ttft_p99 else None,
            max_num_seqs=max_num_seqs,
        )

    @property
    def memory_s(self) -> float:
        """How far back a decision looks."""
        steps = (self.up_step.period_s, self.up_step.cooldown_s, self.down_step.period_s, self.down_step.cooldown_s)
        return max(self.up_stabilization_s, self.down_stabilization_s, self.window_s, *steps)


@dataclass(frozen=True, slots=True)
class Supply:
    """The replicas there are."""

    replicas: int
    """What the Deployment is asked for now."""
    ready: int
    starting: int = 0
    """Not ready, younger than the learned start-up time: they will help soon."""
    overdue: int = 0
    """Not ready, older than that, although a node has room for them."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The load in units of replicas; None where it can't be told."""

    queue: float | None
    """Replicas that hold all requests in flight with at most `queue_depth` waiting each; None without a queue."""
    utilization: float
    """Replicas that hold what runs at 80 % of their slots, or of their KV cache where that is fuller."""
    arrivals: float | None
    """Replicas that keep up with the arrivals at 80 % of what one was measured to finish."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the load asks for, before bounds and time."""

    replicas: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to set, and why."""

    replicas: int
    wanted: int
    """The wish within the user's bounds, before stabilisation."""
    reasons: tuple[str, ...]
    active: bool = True
    """False where there was nothing to go by."""


def decide(
    load: Load | None, supply: Supply, policy: ScalePolicy, history: History, now: float, *, feasible: bool = True
) -> tuple[Decision, History]:
    """One tick of the autoscaler. Holds, and never shrinks, without metrics."""
    history = history.observe(now, supply.replicas)
    if load is None:
        decision = _hold(supply, policy)
    else:
        history = history.measured(now, load.drain_per_s)
        wish = optimise(analyse(load, policy, history, now), load, supply, policy, history, now, feasible=feasible)
        decision = limit(wish, supply.replicas, policy, history, now)
    return decision, history.remember(now, decision.wanted, policy.memory_s)


def _hold(supply: Supply, policy: ScalePolicy) -> Decision:
    """Nothing is known about the load: keep what there is, within the bounds that the user set."""
    replicas = _bounded(supply.replicas, policy)
    why = "no metrics from any ready pod" if supply.ready else "no ready pod yet"
    return Decision(replicas, replicas, (f"{why}: holding at {replicas}",), active=False)


def analyse(load: Load, policy: ScalePolicy, history: History, now: float) -> Analysis:
    """Put the load into units of replicas."""
    busy = sum(max(pod.running / policy.max_num_seqs, pod.kv_usage) for pod in load.pods)
    drain = history.drain
    usable = drain is not None and now - drain[0] <= CAPACITY_KEEP_S
    arrivals = None
    if usable and drain is not None and load.arrivals_per_s is not None:
        arrivals = load.arrivals_per_s / (drain[1] * TARGET_UTILIZATION)
    in_flight = load.running + load.waiting
    queue = in_flight / (_slots(load, policy) + policy.queue_depth) if load.waiting else None
    return Analysis(queue=queue, utilization=busy / TARGET_UTILIZATION, arrivals=arrivals)


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
) -> Wish:
    """The number of replicas that the load asks for: the largest of what each signal asks for."""
    wishes = []
    if analysis.queue is not None:
        why = (
            f"queue: {load.waiting:.0f} waiting, {load.running:.0f} running, {policy.queue_depth} may wait per replica"
        )
        wishes.append(_rounded(analysis.queue, why, supply, policy))
    why = f"slots: {load.running:.0f} running, {policy.max_num_seqs} per replica, used to {TARGET_UTILIZATION:.0%}"
    wishes.append(_rounded(analysis.utilization, why, supply, policy))
    if analysis.arrivals is not None and history.drain is not None:
        why = f"arrivals: {load.arrivals_per_s:.2f}/s, one replica finishes {history.drain[1]:.2f}/s"
        wishes.append(_rounded(analysis.arrivals, why, supply, policy))
    if feasible:
        wishes.append(_ttft_bias(load, supply, policy, history, now))
    replicas = max(wish.replicas for wish in wishes)
    reasons = tuple(reason for wish in wishes for reason in wish.reasons)
    if supply.overdue and replicas > supply.ready + supply.starting:
        replicas += supply.overdue
        reasons += (f"supply: {supply.overdue} pods are overdue and not counted on -> {replicas}",)
    return _veto(Wish(replicas, reasons), load, supply, policy, feasible=feasible)


def _rounded(raw: float, why: str, supply: Supply, policy: ScalePolicy) -> Wish:
    """Whole replicas; within the tolerance of what there is, what there is."""
    current = supply.replicas
    near = current > 0 and abs(raw / current - 1) <= policy.tolerance
    replicas = current if near else math.ceil(raw)
    return Wish(replicas, (f"{why} -> {replicas}",))


def _ttft_bias(load: Load, supply: Supply, policy: ScalePolicy, history: History, now: float) -> Wish:
    """One more while the promise is broken, once the replica added last has had a window to show its effect."""
    broken = policy.ttft_p99_s is not None and load.ttft_p99_s is not None and load.ttft_p99_s > policy.ttft_p99_s
    if not broken or not (load.waiting or load.running):
        return Wish(0, ())
    what = f"ttft: p99 {load.ttft_p99_s:.2f}s is over the promised {policy.ttft_p99_s:.2f}s"
    recent = history.last_up_s is not None and now - history.last_up_s < policy.window_s
    if supply.starting or recent:
        return Wish(supply.replicas, (f"{what}: waiting for the replicas just added -> {supply.replicas}",))
    return Wish(supply.replicas + 1, (f"{what} -> {supply.replicas + 1}",))


def _veto(wish: Wish, load: Load, supply: Supply, policy: ScalePolicy, *, feasible: bool) -> Wish:
    """No replica is removed on half the evidence, nor while the promise is nearly broken."""
    if wish.replicas >= supply.replicas:
        return wish
    if load.missing:
        total = len(load.missing) + len(load.pods)
        reason = f"hold: metrics of {len(load.missing)} of {total} ready pods are missing, not shrinking"
        return Wish(supply.replicas, (*wish.reasons, reason))
    target, p99 = policy.ttft_p99_s, load.ttft_p99_s
    if feasible and target is not None and p99 is not None and p99 > target * TTFT_VETO:
        reason = f"hold: p99 TTFT {p99:.2f}s is close to the promised {target:.2f}s, not shrinking"
        return Wish(supply.replicas, (*wish.reasons, reason))
    return wish


def limit(wish: Wish, current: int, policy: ScalePolicy, history: History, now: float) -> Decision:
    """Bound what may be reached, and how fast.

    Never above or below the user's bounds, which rule at once. Within them: shrinks only down to the highest wish
    younger than the scale-down stabilisation, grows only up to the lowest wish younger than the scale-up
    stabilisation, and moves no further than the step that the period allows.
    """
    wanted = _bounded(wish.replicas, policy)
    reasons = list(wish.reasons)
    if wanted != wish.replicas:
        reasons.append(f"bounds: {policy.min_replicas} to {policy.max_replicas} -> {wanted}")
    settled = _stabilized(wanted, current, policy, history, now)
    if settled != wanted:
        window_s = policy.down_stabilization_s if wanted < current else policy.up_stabilization_s
        reasons.append(f"stabilization: {wanted} must hold for {window_s:g}s -> {settled}")
    replicas = min(settled, highest(current, policy.up_step, history, now))
    replicas = max(replicas, lowest(current, policy.down_step, history, now))
    if replicas != settled:
        reasons.append(_step_reason(policy.up_step if settled > current else policy.down_step, replicas, current))
    return Decision(_bounded(replicas, policy), wanted, tuple(reasons))


def _stabilized(wanted: int, current: int, policy: ScalePolicy, history: History, now: float) -> int:
    if wanted < current:
        return min(current, max(wanted, *_recent(history, now, policy.down_stabilization_s), 0))
    if wanted > current:
        return max(current, min(wanted, *_recent(history, now, policy.up_stabilization_s), wanted))
    return wanted


def _step_reason(step: ScaleStep, replicas: int, current: int) -> str:
    if replicas == current and step.cooldown_s:
        return f"cooldown: no step within {step.cooldown_s:g}s of a change -> {replicas}"
    return f"step: at most {step.replicas} replicas or {step.percent}% in {step.period_s:g}s -> {replicas}"


def _bounded(replicas: int, policy: ScalePolicy) -> int:
    return min(max(replicas, policy.min_replicas), policy.max_replicas)


def _recent(history: History, now: float, window_s: float) -> list[int]:
    return [wanted for time_s, wanted in history.wishes if time_s > now - window_s]
