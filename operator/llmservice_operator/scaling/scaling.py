"""How many replicas: signals → analyse → optimise → limit → a decision with its reasons.

Every step is a plain function of what it is given; time comes in as seconds of a monotonic clock. The queue and the
arrivals drive the number. p99 TTFT only tilts it, one up while the promise is broken and never down meanwhile, and only
where the load explains it: it lags behind the load and then falls off a cliff. Completions alone are never used, since
an overload caps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmservice_operator.api import duration
from llmservice_operator.api.spec import Autoscaling, Slo
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.lanes import BatchMode, counted
from llmservice_operator.scaling.step import ScaleStep, highest, lowest
from llmservice_operator.signals.load import Load

TARGET_UTILIZATION = 0.8
"""Waits explode beyond it (queueing theory): plan for this share of the slots, not for all of them."""
TTFT_VETO = 0.8
"""No replica is removed while p99 TTFT is above this share of the promise."""
TTFT_ENOUGH = 20
"""Requests in the window from which p99 TTFT can ask for a replica: of fewer it is the slowest one alone."""
TTFT_EXPLAINED = 0.5
"""Share of the slots in use from which running requests may hold up the next one's first token."""
MISSING = 0.1
"""Share of the ready pods whose metrics may be missing when a replica is removed: the silent ones may be the busy."""


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
    batch: BatchMode = "fill"

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
            batch=autoscaling.batch,
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
    lead_s: float = 60.0
    """How long a replica that is asked for takes until it serves."""
    trouble: str | None = None
    """What keeps pods from starting, where more of them would meet it as well."""

    @property
    def counted(self) -> int:
        """The replicas that serve or will soon."""
        return max(0, self.replicas - self.overdue)


@dataclass(frozen=True, slots=True)
class Analysis:
    """The load in units of replicas; None where it can't be told."""

    queue: float | None
    """Replicas that hold what is in flight with at most `queue_depth` waiting each, soon; None without a queue."""
    utilization: float
    """Replicas that hold what runs at 80 % of their slots, or of their KV cache where that is fuller."""
    arrivals: float | None
    """Replicas that keep up with the arrivals at 80 % of what one was measured to finish."""
    capacity_per_s: float | None
    """What that is."""


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
    """One tick of the autoscaler. Holds, and never shrinks, without metrics; what it holds at is nobody's wish."""
    history = history.observe(now, supply.replicas)
    if load is None:
        return _hold(supply, policy), history.remember(now, None, policy.memory_s)
    history = history.measure(now, load.drain_per_s, load.finished_per_s)
    asking = counted(load, policy.batch, TARGET_UTILIZATION, policy.max_num_seqs)
    analysis = analyse(asking, _slots(load, policy), supply, policy, history.capacity_per_s(now))
    wish = optimise(analysis, asking, supply, policy, history, now, feasible=feasible)
    decision = limit(wish, supply.replicas, policy, history, now)
    if decision.replicas < supply.replicas and load.answered < 1 - MISSING:
        decision = _hold_for_missing(decision, load, supply, policy)
    return decision, history.remember(now, decision.wanted, policy.memory_s)


def _hold(supply: Supply, policy: ScalePolicy) -> Decision:
    """Nothing is known about the load: keep what there is, within the bounds that the user set."""
    replicas = _bounded(supply.replicas, policy)
    why = "no metrics from any ready pod" if supply.ready else "no ready pod yet"
    return Decision(replicas, replicas, (f"{why}: holding at {replicas}",), active=False)


def _hold_for_missing(decision: Decision, load: Load, supply: Supply, policy: ScalePolicy) -> Decision:
    total = len(load.missing) + len(load.pods)
    reason = f"hold: metrics of {len(load.missing)} of {total} ready pods are missing, not shrinking"
    return replace(decision, replicas=_bounded(supply.replicas, policy), reasons=(*decision.reasons, reason))


def analyse(load: Load, slots: float, supply: Supply, policy: ScalePolicy, capacity_per_s: float | None) -> Analysis:
    """Put the load into units of replicas; pods whose metrics are missing are taken to be like the others.

    `slots` is what one replica really runs at once. A queue asks for the replicas that hold all that is in flight, or
    for those that work it off in the time that a new one takes to start, whichever are fewer: any more would have
    nothing to do by the time that they serve.
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
        if load.waiting:  # pods that work a queue off are full, however few of them are needed
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
    if analysis.arrivals is not None:
        why = f"arrivals: {load.arrivals_per_s:.2f}/s, one replica finishes {analysis.capacity_per_s:.2f}/s"
        wishes.append(_rounded(analysis.arrivals, why, supply, policy))
    wish = _replace_overdue(_largest(wishes), supply, policy)
    if not feasible:
        return wish
    wish = _largest([wish, _ttft_bias(load, supply, policy, history, now)])
    return _veto(wish, load, supply, policy)


def _largest(wishes: Sequence[Wish]) -> Wish:
    return Wish(max(wish.replicas for wish in wishes), tuple(reason for wish in wishes for reason in wish.reasons))


def _replace_overdue(wish: Wish, supply: Supply, policy: ScalePolicy) -> Wish:
    """`stepReplicas` more at most for pods that do not come, since those that are added may not come either."""
    if not supply.overdue or wish.replicas <= supply.ready + supply.starting:
        return wish
    what = f"supply: {supply.overdue} pods are overdue"
    if supply.trouble is not None:
        return Wish(wish.replicas, (*wish.reasons, f"{what}, {supply.trouble} would keep others as well"))
    replicas = wish.replicas + min(supply.overdue, max(1, policy.up_step.replicas))
    return Wish(replicas, (*wish.reasons, f"{what} and not counted on -> {replicas}"))


def _rounded(raw: float, why: str, supply: Supply, policy: ScalePolicy) -> Wish:
    """Whole replicas; within the tolerance of what there is, what there is."""
    current = supply.counted
    near = current > 0 and abs(raw / current - 1) <= policy.tolerance
    replicas = current if near else math.ceil(raw)
    return Wish(replicas, (f"{why} -> {replicas}",))


def _ttft_bias(load: Load, supply: Supply, policy: ScalePolicy, history: History, now: float) -> Wish:
    """One more while the load explains that the promise is broken, once the replica added last has had a window to
    show its effect, and the time in which the queue is worked off where there is one."""
    p99, target = load.ttft_p99_s, policy.ttft_p99_s
    if p99 is None or target is None or p99 <= target or not (load.waiting or load.running):
        return Wish(0, ())
    what = f"ttft: p99 {p99:.2f}s is over the promised {target:.2f}s"
    if load.ttft_count < TTFT_ENOUGH:
        return Wish(0, (f"{what}, of {load.ttft_count:.0f} requests: too few to tell",))
    if not _explains_ttft(load, supply.ready, policy):
        return Wish(0, (f"{what}: neither queue nor slots explain it, no replica would help",))
    effect_s = max(policy.window_s, supply.lead_s) if load.waiting else policy.window_s
    recent = history.last_up_s is not None and now - history.last_up_s < effect_s
    if supply.starting or supply.overdue or supply.trouble or recent:
        return Wish(supply.replicas, (f"{what}: waiting for the replicas just added -> {supply.replicas}",))
    return Wish(supply.replicas + 1, (f"{what} -> {supply.replicas + 1}",))


def _explains_ttft(load: Load, replicas: int, policy: ScalePolicy) -> bool:
    """Whether requests would wait for others on so many replicas, so that a replica more or less shows in TTFT."""
    queued = load.waiting / load.answered >= max(1, replicas) and load.running > 0
    return queued or _busy(load, policy) >= TTFT_EXPLAINED * replicas


def _veto(wish: Wish, load: Load, supply: Supply, policy: ScalePolicy) -> Wish:
    """No replica is removed while the promise is nearly broken and those that stay would be busy."""
    target, p99 = policy.ttft_p99_s, load.ttft_p99_s
    close = target is not None and p99 is not None and p99 > target * TTFT_VETO
    if wish.replicas >= supply.replicas or not close or not _explains_ttft(load, wish.replicas, policy):
        return wish
    reason = f"hold: p99 TTFT {p99:.2f}s is close to the promised {target:.2f}s, not shrinking"
    return Wish(supply.replicas, (*wish.reasons, reason))


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
        if history.unmeasured_s is not None and now - history.unmeasured_s < policy.down_stabilization_s:
            return current
        return min(current, max(wanted, *history.wishes_within(policy.down_stabilization_s, now), 0))
    if wanted > current:
        return max(current, min(wanted, *history.wishes_within(policy.up_stabilization_s, now), wanted))
    return wanted


def _step_reason(step: ScaleStep, replicas: int, current: int) -> str:
    if replicas == current and step.cooldown_s:
        return f"cooldown: no step within {step.cooldown_s:g}s of a change -> {replicas}"
    return f"step: at most {step.replicas} replicas or {step.percent}% in {step.period_s:g}s -> {replicas}"


def _bounded(replicas: int, policy: ScalePolicy) -> int:
    return min(max(replicas, policy.min_replicas), policy.max_replicas)
