"""The number of replicas that the load asks for, before bounds and time: the largest of what each signal asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmservice_operator.scaling.analysis import Analysis, busy_replicas
from llmservice_operator.scaling.capacity import MOST_UTILIZATION
from llmservice_operator.scaling.demand import SAMPLE_S
from llmservice_operator.scaling.forecast import Forecast
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import Load
from llmservice_operator.scaling.policy import TARGET_UTILIZATION, ScalePolicy
from llmservice_operator.scaling.supply import Supply

TTFT_VETO = 0.8
"""No replica is removed while p99 TTFT is above this share of the target."""
TTFT_ENOUGH = 20
"""Requests in the window from which p99 TTFT can ask for a replica: of fewer it is the slowest one alone."""
TTFT_EXPLAINED = 0.5
"""Share of the slots in use from which running requests may delay the next one's first token."""
DRAIN_S = 20.0
"""Within so long replicas are to finish a queue beside what arrives, or within half their start-up time if that is
longer: more of them would be idle soon after they serve."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What the load asks for, before bounds and time."""

    replicas: int
    reasons: tuple[str, ...] = ()


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
    forecast = analysis.forecast
    signals = _in_flight(analysis, load, supply, policy)
    if analysis.arrivals is not None and forecast is None:
        rates = f"{load.arrivals_per_s:.2f}/s, one replica finishes {analysis.capacity_per_s:.2f}/s"
        signals.append((analysis.arrivals, f"arrivals: {rates}"))
    asked = [_rounded(raw, why, supply, policy) for raw, why in signals if raw is not None]
    if forecast is not None:
        flow = _flow(forecast, load, supply, policy)
        is_strict = analysis.is_predicted and not history.shrunk_within(policy.down.stabilization_s, now)
        asked += [_rounded(raw, why, supply, policy, is_strict=is_strict) for raw, why in flow]
    largest = _largest(asked)
    recommendation = _replace_overdue(largest, supply, policy)
    if feasible:
        recommendation = _largest([recommendation, _ttft_bias(load, supply, policy, history, now)])
        recommendation = _veto(recommendation, load, supply, policy)
    if forecast is not None and recommendation.replicas < supply.replicas:
        return _checked_without(recommendation, forecast, analysis.busy, supply, policy, history, now)
    return recommendation


Signal = tuple[float | None, str]
"""Replicas, not rounded, and why."""


def _flow(forecast: Forecast, load: Load, supply: Supply, policy: ScalePolicy) -> list[tuple[float, str]]:
    """What arrives and will arrive, at the utilisation that keeps the target of TTFT.

    Where the capacity is predicted, requests that run ask for the replicas that decode them: by Little's law a load,
    and one that shows before a minute of arrivals does.
    """
    demand, capacity = forecast.demand, forecast.capacity
    if capacity is None:
        return [(0.0, f"demand: nothing arrives in {policy.window_s:g}s")]
    how = "measured" if capacity.source == "measured" else f"predicted × {capacity.correction:.2f}"
    arriving = f"{demand.requests:.2f}/s with {demand.prompt_tokens:,.0f} prompt and {demand.output_tokens:,.0f} output"
    needed = forecast.staffing.replicas(forecast.level)
    used = forecast.level / needed if needed else forecast.staffing.alone
    serves = f"one replica serves {capacity.serves.requests:.2f}/s ({how}), used to {used:.0%}"
    signals = [(needed, f"demand: {arriving} tokens/s, {serves}")]
    if forecast.running is not None:
        held = f"running: {load.running:.0f} requests keep {forecast.running:.2f} replicas busy"
        signals.append((forecast.staffing.replicas(forecast.running), held))
    if forecast.trend is not None:
        by = f"{forecast.trend.per_s * 60:+.2f} replicas' load a minute over {forecast.trend.over_s:.0f}s"
        why = f"forecast: {forecast.level:.2f} replicas' load now, {by}, {forecast.predicted:.2f}"
        signals.append(
            (forecast.staffing.replicas(forecast.predicted), f"{why} in the {forecast.horizon_s:.0f}s of a start")
        )
    if forecast.is_burst:
        why = f"burst: {forecast.recent:.2f} replicas' load in the last {SAMPLE_S:.0f}s, {forecast.level:.2f} before"
        signals.append((forecast.staffing.replicas(forecast.recent), why))
    return signals


def _in_flight(analysis: Analysis, load: Load, supply: Supply, policy: ScalePolicy) -> list[Signal]:
    """What waits and what runs. Where the capacity is predicted, a queue beyond `queueDepth` asks for the replicas that
    finish it soon, together with what comes until they serve."""
    forecast = analysis.forecast
    slots = f"{load.running:.0f} running, {policy.max_num_seqs} per replica, used to {TARGET_UTILIZATION:.0%}"
    if forecast is None or not analysis.is_predicted:
        queue = f"{load.waiting:.0f} waiting, {load.running:.0f} running, {policy.queue_depth} may wait per replica"
        return [
            (analysis.queue, f"queue: {queue}"),
            (analysis.utilization, f"slots: {slots}"),
        ]
    signals: list[Signal] = [(analysis.utilization, f"slots: {slots}")]
    waiting = load.waiting / load.answered - supply.ready * policy.queue_depth
    if waiting > 0 and forecast.request and supply.trouble is None:
        grows = forecast.most * supply.lead_s - supply.serves_s
        work_s = max(0.0, waiting * forecast.request + grows)
        why = f"backlog: {waiting:.0f} wait beyond {policy.queue_depth} per replica, {work_s:.0f}s of a replica's work"
        within_s = max(DRAIN_S, supply.lead_s / 2)
        why += f" by the time that a new one serves, to be done in {within_s:.0f}s"
        signals.append((forecast.most + work_s / within_s, why))
    return signals


def _checked_without(
    asked: Recommendation,
    forecast: Forecast,
    busy: float,
    supply: Supply,
    policy: ScalePolicy,
    history: History,
    now: float,
) -> Recommendation:
    """Fewer replicas only where those that stay hold what runs, and keep the promise with what is in flight, what
    arrives and what is predicted."""
    if history.burst_s is not None and now - history.burst_s < policy.window_s:
        reason = f"burst: not shrinking within {policy.window_s:g}s of one -> {supply.replicas}"
        return Recommendation(supply.replicas, (*asked.reasons, reason))
    most = max(forecast.most, forecast.running or 0.0)
    kept = max(math.ceil(forecast.staffing.replicas(most)), math.ceil(busy / MOST_UTILIZATION))
    replicas = min(supply.replicas, max(asked.replicas, kept))
    load = max(most, busy)
    checked = max(1, supply.replicas - 1 if replicas == supply.replicas else replicas)
    used = f"n-1: {checked} would be used to {load / checked:.0%} by what runs, arrives and may arrive"
    reason = f"{used}, {forecast.staffing.utilization(checked):.0%} is allowed -> {replicas}"
    return Recommendation(replicas, (*asked.reasons, reason))


def _largest(signals: Iterable[Recommendation]) -> Recommendation:
    each = list(signals)
    return Recommendation(max(one.replicas for one in each), tuple(reason for one in each for reason in one.reasons))


def _rounded(raw: float, why: str, supply: Supply, policy: ScalePolicy, *, is_strict: bool = False) -> Recommendation:
    """Whole replicas; within the tolerance of the present number, the present number.

    `is_strict`: the tolerance is for fewer only, for the room that more need is in the utilisation that is planned for.
    Soon after a removal it is for both, lest chance bring the replica back.
    """
    current = supply.counted
    near = current > 0 and -policy.tolerance <= raw / current - 1 <= (0.0 if is_strict else policy.tolerance)
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

    The replica added last first has its start-up time and a window to show its effect.
    """
    p99, target = load.ttft_p99_s, policy.ttft_p99_s
    if p99 is None or target is None or p99 <= target or not (load.waiting or load.running):
        return Recommendation(0)
    what = f"ttft: p99 {p99:.2f}s is above the target of {target:.2f}s"
    if load.ttft_count < TTFT_ENOUGH:
        return Recommendation(0, (f"{what}, of {load.ttft_count:.0f} requests: too few to tell",))
    if load.ttft_certain_s is None or load.ttft_certain_s <= target:
        return Recommendation(0, (f"{what}: as few of {load.ttft_count:.0f} requests may be later by chance",))
    if not _explains_ttft(load, supply.ready, policy):
        return Recommendation(0, (f"{what}: neither queue nor slots explain it, no replica would help",))
    recent = history.last_up_s is not None and now - history.last_up_s < supply.lead_s + policy.window_s
    if supply.starting or supply.overdue or supply.trouble or recent:
        reason = f"{what}: waiting for the replicas just added -> {supply.replicas}"
        return Recommendation(supply.replicas, (reason,))
    return Recommendation(supply.replicas + 1, (f"{what} -> {supply.replicas + 1}",))


def _explains_ttft(load: Load, replicas: int, policy: ScalePolicy) -> bool:
    """Whether requests would wait for others on so many replicas, so that a replica more or less shows in TTFT."""
    queued = load.waiting / load.answered >= max(1, replicas) and load.running > 0
    return queued or busy_replicas(load, policy) >= TTFT_EXPLAINED * replicas


def _veto(asked: Recommendation, load: Load, supply: Supply, policy: ScalePolicy) -> Recommendation:
    """No replica is removed while the target is nearly missed and those that stay would be busy."""
    target, p99 = policy.ttft_p99_s, load.ttft_p99_s
    close = target is not None and p99 is not None and p99 > target * TTFT_VETO
    if asked.replicas >= supply.replicas or not close or not _explains_ttft(load, asked.replicas, policy):
        return asked
    reason = f"hold: p99 TTFT {p99:.2f}s is close to the target of {target:.2f}s, not shrinking"
    return Recommendation(supply.replicas, (*asked.reasons, reason))


def keep_last(asked: Recommendation, policy: ScalePolicy, history: History) -> Recommendation:
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
