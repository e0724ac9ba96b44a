"""Kubernetes' HorizontalPodAutoscaler, and KEDA, which feeds one.

https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/#algorithm-details and the same
algorithm's code, pkg/controller/podautoscaler: `replica_calculator.go` and `horizontal.go`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llmservice_bench.simulation.observation import Bounds, Observation
from llmservice_operator.scaling.decision import Decision
from llmservice_operator.scaling.load import Scrape

SYNC_S = 15.0
TOLERANCE = 0.1
DOWN_STABILIZATION_S = 300.0
UP_PODS, UP_PERCENT, PERIOD_S = 4, 100, 15.0
"""Defaults of kube-controller-manager and of `spec.behavior`."""

Metric = Callable[[Scrape], float]

METRICS: dict[str, Metric] = {
    "in_flight": lambda scrape: scrape.running + scrape.waiting,
    "waiting": lambda scrape: scrape.waiting,
    "running": lambda scrape: scrape.running,
    "kv_usage": lambda scrape: scrape.kv_usage,
}
"""What a replica's metric may be."""


def of_pods(values: Sequence[float], unready: int, target: float, current: int, tolerance: float = TOLERANCE) -> int:
    """Replicas by the mean of the ready replicas' `values` (type Pods): ceil(ready x mean / target).

    Within the tolerance the number stays. Replicas that are not ready count as idle where the load asks for more; if
    that changes the direction, the number stays.
    """
    if not values:
        return current
    ratio = sum(values) / (len(values) * target)
    if not unready or ratio <= 1:
        return current if abs(ratio - 1) <= tolerance else math.ceil(ratio * len(values))
    counted = len(values) + unready
    ratio = sum(values) / (counted * target)
    wanted = math.ceil(ratio * counted)
    return current if ratio < 1 or abs(ratio - 1) <= tolerance or wanted < current else wanted


def of_total(total: float, target: float, current: int, tolerance: float = TOLERANCE) -> int:
    """Replicas by a metric of the whole service (type External, AverageValue): ceil(total / target)."""
    if current and abs(total / (target * current) - 1) <= tolerance:
        return current
    return math.ceil(total / target)


class Behavior:
    """`spec.behavior` with its defaults: down to the highest recommendation of 300 s, up by 4 or 100 % in 15 s."""

    def __init__(self, down_stabilization_s: float = DOWN_STABILIZATION_S) -> None:
        self._down_s = down_stabilization_s
        self._recommended: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def limit(self, wanted: int, current: int, bounds: Bounds, now: float) -> tuple[int, list[str]]:
        """The number to set, and why it is another one than `wanted`."""
        if not self._recommended:
            self._recommended.append((now, current))  # as the controller does when it first sees the object
        self._recommended = [one for one in self._recommended if one[0] > now - self._down_s]
        self._recommended.append((now, wanted))
        reasons = []
        replicas = wanted if wanted >= current else min(current, max(each for _, each in self._recommended))
        if replicas != wanted:
            reasons.append(f"stabilization: {wanted} must hold for {self._down_s:g}s -> {replicas}")
        before = current - sum(change for when, change in self._changes if when > now - PERIOD_S and change > 0)
        highest = max(before + UP_PODS, math.ceil(before * (1 + UP_PERCENT / 100)), current)
        if replicas > highest:
            replicas = highest
            reasons.append(f"step: at most {UP_PODS} replicas or {UP_PERCENT}% in {PERIOD_S:g}s -> {replicas}")
        bounded = bounds.of(replicas)
        if bounded != replicas:
            reasons.append(f"bounds: {bounds.min_replicas} to {bounds.max_replicas} -> {bounded}")
        if bounded != current:
            self._changes = [*(one for one in self._changes if one[0] > now - PERIOD_S), (now, bounded - current)]
        return bounded, reasons


class HorizontalPodAutoscaler:
    """By one metric of each ready replica, as a user of a Prometheus adapter configures it."""

    name = "hpa"
    interval_s = SYNC_S
    jitter = 0.0
    wakes = False

    def __init__(
        self,
        bounds: Bounds,
        target: float,
        metric: str = "in_flight",
        down_stabilization_s: float = DOWN_STABILIZATION_S,
    ) -> None:
        """`target`: of the metric, per replica."""
        self._bounds = bounds
        self._target = target
        self._metric = metric
        self._behavior = Behavior(down_stabilization_s)

    def decide(self, seen: Observation) -> Decision:
        if seen.replicas == 0:
            return Decision(0, 0, ("hpa: disabled at 0 replicas, which it never leaves",), active=False)
        values = [METRICS[self._metric](scrape) for scrape in seen.scrapes.values()]
        unready = sum(not pod.ready and not pod.terminating for pod in seen.pods)
        wanted = of_pods(values, unready, self._target, seen.replicas)
        mean = sum(values) / len(values) if values else math.nan
        reason = f"hpa: {self._metric} is {mean:.3g} per ready replica, target {self._target:.3g} -> {wanted}"
        replicas, limits = self._behavior.limit(wanted, seen.replicas, self._bounds, seen.now_s)
        return Decision(replicas, self._bounds.of(wanted), (reason, *limits), active=bool(values))


POLLING_S, COOLDOWN_S = 30.0, 300.0
"""`pollingInterval` and `cooldownPeriod` of a ScaledObject."""


class Keda:
    """A ScaledObject on the service's requests in flight, those that the gateway holds included.

    KEDA polls for activity, from which it sets 0 or 1 replicas: 1 once there is any, 0 after a cooldown without. In
    between, the HPA that it creates asks it for the metric every 15 s.
    https://keda.sh/docs/latest/concepts/scaling-deployments/ and https://keda.sh/docs/latest/reference/scaledobject-spec/
    """

    name = "keda"
    interval_s = SYNC_S
    jitter = 0.0
    wakes = False

    def __init__(self, bounds: Bounds, target: float, cooldown_s: float = COOLDOWN_S) -> None:
        """`target`: requests in flight per replica."""
        self._bounds = bounds
        self._target = target
        self._cooldown_s = cooldown_s
        self._behavior = Behavior()
        self._polled_s = -math.inf
        self._active_s = 0.0

    def decide(self, seen: Observation) -> Decision:
        now, total = seen.now_s, seen.in_flight
        polls = now - self._polled_s >= POLLING_S
        if polls:
            self._polled_s = now
            self._active_s = now if total > 0 else self._active_s
        if seen.replicas == 0:
            replicas = self._bounds.of(1) if polls and total > 0 else 0
            why = "" if polls else f", polled every {POLLING_S:g}s"
            return Decision(replicas, replicas, (f"keda: {total:.0f} in flight{why} -> {replicas}",))
        idle_s = now - self._active_s
        if polls and self._bounds.min_replicas == 0 and total == 0 and idle_s >= self._cooldown_s:
            return Decision(0, 0, (f"keda: no request for {self._cooldown_s:g}s -> 0",))
        wanted = of_total(total, self._target, seen.replicas)
        reason = f"keda: {total:.0f} in flight, target {self._target:.3g} per replica -> {wanted}"
        bounds = Bounds(max(1, self._bounds.min_replicas), self._bounds.max_replicas)
        replicas, limits = self._behavior.limit(wanted, seen.replicas, bounds, now)
        return Decision(replicas, bounds.of(wanted), (reason, *limits))
