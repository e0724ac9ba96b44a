"""How far and how fast the recommendation may be followed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.forecast import Forecast
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.policy import ScalePolicy
from llmservice_operator.scaling.recommendation import Recommendation


@dataclass(frozen=True, slots=True)
class Decision:
    """What to set, and why."""

    replicas: int
    wanted: int
    """The recommendation within the user's bounds, before stabilisation."""
    reasons: tuple[str, ...]
    active: bool = True
    """False without metrics."""
    forecast: Forecast | None = None
    """Demand and capacity that it was made with, where they are known."""
    slo: Feasibility | None = None
    """Whether replicas can help to meet the targets of latency, by which it was made."""


def limit(
    asked: Recommendation, current: int, policy: ScalePolicy, history: History, now: float, *, at_once: bool = False
) -> Decision:
    """Bound what may be reached, and how fast.

    Never above or below the user's bounds, which apply at once. Within them: shrinks only to the highest
    recommendation younger than the scale-down stabilisation, grows only to the lowest one younger than the scale-up
    stabilisation, and moves no further than the step that the period allows. `at_once`: growing waits for nothing.

    A scale-down stabilisation that follows the start-up time keeps half of the surplus in its last part, unless
    replicas were added within it, or the history begins in it: what was added is kept for all of it.
    """
    wanted = policy.bounded(asked.replicas)
    reasons = list(asked.reasons)
    if wanted != asked.replicas:
        reasons.append(policy.bound_reason(asked.replicas, wanted))
    stable = wanted if at_once and wanted > current else _stabilized(wanted, current, policy, history, now)
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
        within_s = policy.down.stabilization_s
        last_up_s = history.started_s if history.last_up_s is None else history.last_up_s
        whole_s = policy.down.whole_s if last_up_s is None or now - last_up_s >= within_s else within_s
        most = max(wanted, *history.recommended_within(within_s, now), 0)
        lately = max(wanted, *history.recommended_within(min(whole_s, within_s), now), 0)
        return min(current, math.ceil((lately + most) / 2))
    if wanted > current:
        return max(current, min(wanted, *history.recommended_within(policy.up.stabilization_s, now), wanted))
    return wanted
