"""How far the replicas may move within a period, and how soon after a change they may move again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmservice_operator.api import duration
from llmservice_operator.api.spec import ScaleDown, ScaleUp
from llmservice_operator.scaling.history import History


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """At most the larger of `replicas` and `percent` in `period_s`, and nothing within `cooldown_s` of a change."""

    replicas: int
    percent: int
    period_s: float
    cooldown_s: float

    @classmethod
    def of(cls, speed: ScaleUp | ScaleDown) -> ScaleStep:
        return cls(
            replicas=speed.step_replicas,
            percent=speed.step_percent,
            period_s=duration.seconds(speed.step_period),
            cooldown_s=duration.seconds(speed.cooldown),
        )

    def size(self, start: int) -> int:
        """Replicas that one period may add to, or take from, `start`; a share of them is rounded up."""
        return max(self.replicas, math.ceil(start * self.percent / 100))


def highest(current: int, step: ScaleStep, history: History, now: float) -> int:
    """The most replicas that may be asked for now; never below `current`."""
    if _cooling(step, history, now):
        return current
    start = _at_period_start(current, step, history, now)
    return max(current, start + step.size(start))


def lowest(current: int, step: ScaleStep, history: History, now: float) -> int:
    """The fewest replicas that may be asked for now; never above `current`."""
    if _cooling(step, history, now):
        return current
    start = _at_period_start(current, step, history, now)
    return min(current, max(0, start - step.size(start)))


def _cooling(step: ScaleStep, history: History, now: float) -> bool:
    last_s = history.last_change_s
    return last_s is not None and now - last_s < step.cooldown_s


def _at_period_start(current: int, step: ScaleStep, history: History, now: float) -> int:
    return max(0, current - sum(more for when, more in history.changes if when > now - step.period_s))
