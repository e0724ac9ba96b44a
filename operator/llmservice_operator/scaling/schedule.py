"""Bounds of the replicas that depend on the clock: a schedule of the least, a day's GPU-hours for the most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

from llmservice_operator.api.autoscaling_spec import ScheduledReplicas
from llmservice_operator.scaling.policy import ScalePolicy

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_LASTS_H = 1.0
"""What is left of a day's GPU-hours has to last so long: the replicas become fewer by and by, not all at once."""


def scheduled(schedule: Sequence[ScheduledReplicas], now: float) -> ScheduledReplicas | None:
    """The entry that applies at `now`, in seconds since 1970; of several, the one with most replicas."""
    found = [entry for entry in schedule if _applies(entry, now)]
    return max(found, key=lambda entry: entry.min_replicas, default=None)


def _applies(entry: ScheduledReplicas, now: float) -> bool:
    local = datetime.fromtimestamp(now, ZoneInfo(entry.time_zone))
    start, end = time.fromisoformat(entry.start), time.fromisoformat(entry.end)
    began = local
    if start < end:
        inside = start <= local.time() < end
    else:
        inside = local.time() >= start or local.time() < end
        began = local - timedelta(days=1) if local.time() < end else local
    return inside and (not entry.days or _DAYS[began.weekday()] in entry.days)


@dataclass(frozen=True, slots=True)
class GpuHours:
    """What the replicas of a service have taken of a day of UTC."""

    day: str
    """As 2026-11-25."""
    hours: float
    counted_s: float
    """Until when, in seconds since 1970."""

    @classmethod
    def start(cls, now: float) -> GpuHours:
        return cls(_day(now), 0.0, now)

    def after(self, replicas: int, gpus: int, now: float) -> GpuHours:
        """With `replicas` from then until now. A clock that is set back counts nothing."""
        midnight_s = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
        is_today = self.day == _day(now)
        since_s = self.counted_s if is_today else max(self.counted_s, midnight_s)
        hours = replicas * gpus * max(0.0, now - since_s) / 3600
        return GpuHours(_day(now), (self.hours if is_today else 0.0) + hours, now)

    def allowed(self, most: float, min_replicas: int, gpus: int) -> int:
        """Replicas that may run now: the least, and more while what is left beside those lasts."""
        return min_replicas + max(0, math.floor(self._left(most, min_replicas, gpus) / gpus / _LASTS_H))

    def _left(self, most: float, min_replicas: int, gpus: int) -> float:
        now = datetime.fromtimestamp(self.counted_s, UTC)
        until_midnight_h = 24 - now.hour - now.minute / 60 - now.second / 3600
        return most - self.hours - min_replicas * gpus * until_midnight_h


def _day(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).date().isoformat()


def policy_at(
    policy: ScalePolicy, schedule: Sequence[ScheduledReplicas], most: float | None, spent: GpuHours, gpus: int
) -> ScalePolicy:
    """The policy with the bounds of this time. What a day's GPU-hours allow goes before the schedule."""
    always = policy.min_replicas
    entry = scheduled(schedule, spent.counted_s)
    if entry is not None and entry.min_replicas > policy.min_replicas:
        days = f"{','.join(entry.days)} " if entry.days else ""
        why = f"schedule: at least {entry.min_replicas} from {days}{entry.start} to {entry.end} {entry.time_zone}"
        policy = replace(policy, min_replicas=min(entry.min_replicas, policy.max_replicas), why_least=why)
    if most is None:
        return policy
    allowed = spent.allowed(most, always, gpus)
    if allowed >= policy.max_replicas:
        return policy
    why = (
        f"cost: {spent.hours:.1f} of {most:g} GPU-hours of the day (UTC) are used, what is left beside minReplicas"
        f" allows {allowed - always} more for an hour"
    )
    return replace(policy, min_replicas=min(policy.min_replicas, allowed), max_replicas=allowed, why_most=why)
