"""The autoscaler's history: recommendations, changes of the replicas, the measured capacity of a replica.

Time is passed in and monotonic, so that setting the wall clock makes nothing older.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from llmservice_operator.api.status import AutoscalingStatus
from llmservice_operator.pods.pod import epoch
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.trend import remembered

LONGEST_GAP_S = 120.0
"""Ticks are seconds apart, a failed pass at most two minutes. A longer gap is a suspended process, or a source of
metrics that was down: time in which the load was not measured says nothing about it."""
CAPACITY_KEEP_S = 3600.0
"""How long a measured capacity counts. It is measured only while a replica is full: forgotten sooner, a service that
just fits would be shrunk, overloaded and measured again in turn; kept for ever, it would outlive the traffic it was of.
"""
_CAPACITY_WEIGHT = 0.1
"""Of one reading against the known capacity: a pod that stalls for a moment, or loads its kernels, changes little."""

_LEAST_CORRECTION = 0.2
"""And at most the inverse: beyond that something other than the latency model is wrong."""

Timed = tuple[float, float]
"""(when, requests per second)."""


@dataclass(frozen=True, slots=True)
class History:
    """Recommendations and changes of the recent past, oldest first, in seconds of one clock."""

    recommendations: tuple[tuple[float, int], ...] = ()
    """(when, replicas) that the load asked for."""
    changes: tuple[tuple[float, int], ...] = ()
    """(when, difference) of the replicas that the Deployment was set to."""
    started_s: float | None = None
    """Since when the replicas are known; what was before may have added them."""
    capacity: Timed | None = None
    """What one full replica finishes, over the readings so far."""
    throughput: Timed | None = None
    """The most that one replica finished lately, full or not."""
    correction: Timed | None = None
    """What full replicas did against what the latency model predicts of them."""
    demands: tuple[tuple[float, Demand], ...] = ()
    """(when, per second) what arrived in the last minutes, by the quarter of a minute."""
    burst_s: float | None = None
    """When the last burst was seen."""
    last_tick: tuple[float, int] | None = None
    """(when, replicas)."""
    measured_s: float | None = None
    """When the load was last measured, or else the first tick."""
    unmeasured_s: float | None = None
    """The end of the last time without metrics that was longer than a gap between ticks."""
    idle_s: float = 0.0
    """For how long measurements have shown no request; 0 after a restart, for what was not measured is not idle."""

    @classmethod
    def start(cls, now: float, replicas: int, changes: tuple[tuple[float, int], ...] = ()) -> History:
        """The present replicas count as recommended until now."""
        return cls(((now, replicas),), changes, now)

    @classmethod
    def resume(cls, status: AutoscalingStatus | None, replicas: int, now: float) -> History:
        """The history after a restart: the changes, and the capacity. Stabilisation begins anew, since no load was seen
        meanwhile."""
        if status is None:
            return cls.start(now, replicas)
        log = status.decisions
        steps = [(epoch(newer.time), newer.replicas - older.replicas) for newer, older in pairwise(log)]
        changes = tuple((min(now, when), change) for when, change in reversed(steps) if change)
        history = cls.start(now, replicas, changes)
        if status.capacity is None:
            return history
        measured_s = epoch(status.capacity.measured_at)
        return replace(
            history,
            capacity=(measured_s, status.capacity.requests_per_second),
            correction=(measured_s, status.capacity.correction),
        )

    @property
    def last_up_s(self) -> float | None:
        return max((when for when, change in self.changes if change > 0), default=None)

    def shrunk_within(self, window_s: float, now: float) -> bool:
        return any(change < 0 and now - when < window_s for when, change in self.changes)

    def observe(self, now: float, replicas: int) -> History:
        """Begin a tick: note changed replicas; unobserved time does not count."""
        if self.last_tick is None:
            return replace(self, last_tick=(now, replicas), measured_s=now)
        then, before = self.last_tick
        history = self if 0 <= now - then <= LONGEST_GAP_S else self.shifted(now - then)
        change = replicas - before
        changes = (*history.changes, (now, change)) if change else history.changes
        return replace(history, changes=changes, last_tick=(now, replicas))

    def arrived(self, now: float, demand: Demand | None) -> History:
        """Note what arrives now, per second."""
        return self if demand is None else replace(self, demands=remembered(self.demands, demand, now))

    def measure(
        self,
        now: float,
        capacity_per_s: float | None,
        finished_per_s: float | None = None,
        quiet_s: float = 0.0,
    ) -> History:
        """Note that there are metrics, and a replica's capacity according to them.

        `capacity_per_s` is a reading of full replicas; it moves the known capacity by a tenth of the difference.
        `finished_per_s` is what a replica, full or not, finished: the capacity is no lower. `quiet_s` is for how long
        the metrics show no request; where that does not reach back to the last measurement, the idle time begins anew.
        """
        gap_s = 0.0 if self.measured_s is None else now - self.measured_s
        throughput, known = _fresh(self.throughput, now), self.capacity_per_s(now)
        if finished_per_s is not None and (throughput is None or finished_per_s >= throughput[1]):
            throughput = (now, finished_per_s)
        capacity = self.capacity
        if capacity_per_s is not None:
            if known is None:
                known = capacity_per_s if throughput is None else max(throughput[1], capacity_per_s)
            capacity = (now, known + _CAPACITY_WEIGHT * (capacity_per_s - known))
        elif known is not None and finished_per_s is not None and finished_per_s > known:
            capacity = (now, finished_per_s)
        return replace(
            self,
            measured_s=now,
            unmeasured_s=now if gap_s > LONGEST_GAP_S else self.unmeasured_s,
            throughput=throughput,
            capacity=capacity,
            idle_s=max(quiet_s, self.idle_s + gap_s) if quiet_s >= gap_s and quiet_s else quiet_s,
        )

    def capacity_per_s(self, now: float) -> float | None:
        """Requests per second that one full replica finishes; None where that is unknown, or too old."""
        capacity = _fresh(self.capacity, now)
        return capacity and capacity[1]

    def correction_at(self, now: float) -> float:
        """1 where no full replica was measured lately."""
        correction = _fresh(self.correction, now)
        return 1.0 if correction is None else correction[1]

    def corrected(self, now: float, full: float | None, certain: float) -> History:
        """Note what replicas did in a second, in seconds that the latency model gives a full replica for it.

        `full` is the mean of those that were full, None where none was; `certain` what any one surely did.
        """
        known = self.correction_at(now)
        if full is not None:
            known += _CAPACITY_WEIGHT * (full - known)
        elif certain > known:
            known = certain
        else:
            return self
        return replace(self, correction=(now, min(max(known, _LEAST_CORRECTION), 1 / _LEAST_CORRECTION)))

    def recommended_within(self, window_s: float, now: float) -> list[int]:
        return [replicas for when, replicas in self.recommendations if when > now - window_s]

    def remember(self, now: float, recommended: int | None, keep_s: float) -> History:
        """End a tick: keep its recommendation, if the load was measured, and forget what is older than `keep_s`."""
        recent = tuple(one for one in self.recommendations if one[0] >= now - keep_s)
        return replace(
            self,
            recommendations=recent if recommended is None else (*recent, (now, recommended)),
            changes=tuple(change for change in self.changes if change[0] >= now - keep_s),
        )

    def forget_capacity(self) -> History:
        """A changed spec may have changed what each replica can do."""
        return replace(self, capacity=None, throughput=None, correction=None)

    def shifted(self, by_s: float) -> History:
        """The same history on a clock that is ahead by `by_s`."""
        return replace(
            self,
            recommendations=tuple((when + by_s, replicas) for when, replicas in self.recommendations),
            changes=tuple((when + by_s, change) for when, change in self.changes),
            started_s=None if self.started_s is None else self.started_s + by_s,
            capacity=self.capacity and (self.capacity[0] + by_s, self.capacity[1]),
            throughput=self.throughput and (self.throughput[0] + by_s, self.throughput[1]),
            correction=self.correction and (self.correction[0] + by_s, self.correction[1]),
            demands=tuple((when + by_s, demand) for when, demand in self.demands),
            burst_s=None if self.burst_s is None else self.burst_s + by_s,
            measured_s=None if self.measured_s is None else self.measured_s + by_s,
            unmeasured_s=None if self.unmeasured_s is None else self.unmeasured_s + by_s,
        )


def _fresh(rate: Timed | None, now: float) -> Timed | None:
    return rate if rate is not None and now - rate[0] <= CAPACITY_KEEP_S else None
