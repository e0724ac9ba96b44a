"""Knative's pod autoscaler (KPA): concurrency over a stable window, and over a panic window in a burst.

https://knative.dev/docs/serving/autoscaling/kpa-specific/ and the same algorithm's code, pkg/autoscaler/scaling/
autoscaler.go of knative/serving.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from llmservice_bench.simulation.observation import Bounds, Observation
from llmservice_operator.scaling.decision import Decision

TICK_S = 2.0
STABLE_S, PANIC_S = 60.0, 6.0
PANIC_THRESHOLD = 2.0
UTILIZATION = 0.7
MAX_UP_RATE, MAX_DOWN_RATE = 1000.0, 2.0
ZERO_GRACE_S = 30.0
"""Defaults of the ConfigMap config-autoscaler."""


@dataclass(frozen=True, slots=True)
class Panic:
    """Since when the last burst was seen, and the most replicas that it asked for."""

    since_s: float
    replicas: int


def decide(
    stable: float, panic: float, ready: int, target: float, burst: Panic | None, now: float
) -> tuple[int, Panic | None]:
    """Replicas for the mean concurrency in both windows, and whether there is panic; `target` is of one replica.

    In panic the number never falls; it ends when no burst was seen for a stable window.
    """
    counted = max(1, ready)
    highest, lowest = math.ceil(MAX_UP_RATE * counted), math.floor(counted / MAX_DOWN_RATE)
    by_stable = min(max(math.ceil(stable / target), lowest), highest)
    by_panic = min(max(math.ceil(panic / target), lowest), highest)
    if math.ceil(panic / target) / counted >= PANIC_THRESHOLD:
        burst = Panic(now, 0 if burst is None else burst.replicas)
    elif burst is not None and now - burst.since_s > STABLE_S:
        burst = None
    if burst is None:
        return by_stable, None
    replicas = max(by_panic, by_stable, burst.replicas)
    return replicas, Panic(burst.since_s, replicas)


class KnativePodAutoscaler:
    """By concurrency: requests in flight, those that the gateway holds included."""

    name = "kpa"
    interval_s = TICK_S
    jitter = 0.0
    wakes = False

    def __init__(self, bounds: Bounds, target: float) -> None:
        """`target`: requests in flight per replica."""
        self._bounds = bounds
        self._target = target
        self._burst: Panic | None = None
        self._samples: deque[tuple[float, float]] = deque([(0.0, 0.0)])
        """Time, and the integral of requests in flight until then."""
        self._idle_s: float | None = None

    def decide(self, seen: Observation) -> Decision:
        now = seen.now_s
        if now > self._samples[-1][0]:
            self._samples.append((now, seen.totals.in_flight_s))
        while len(self._samples) > 2 and self._samples[1][0] <= now - STABLE_S:
            self._samples.popleft()
        stable, panic = self._mean(now - STABLE_S, seen), self._mean(now - PANIC_S, seen)
        wanted, self._burst = decide(stable, panic, seen.ready, self._target, self._burst, now)
        mode = "panic" if self._burst is not None else "stable"
        reasons = [f"kpa: {stable:.1f} in flight ({panic:.1f} in 6s), target {self._target:.3g}, {mode} -> {wanted}"]
        replicas = self._bounds.of(wanted)
        if replicas != wanted:
            reasons.append(f"bounds: {self._bounds.min_replicas} to {self._bounds.max_replicas} -> {replicas}")
        self._idle_s = (now if self._idle_s is None else self._idle_s) if replicas == 0 else None
        if self._idle_s is not None and seen.replicas and now - self._idle_s < ZERO_GRACE_S:
            replicas = 1
            reasons.append(f"grace: the last replica stays for {ZERO_GRACE_S:g}s -> 1")
        return Decision(replicas, self._bounds.of(wanted), tuple(reasons))

    def _mean(self, since_s: float, seen: Observation) -> float:
        """Of the requests in flight, since the last sample that is not younger."""
        before = self._samples[0]
        for sample in self._samples:
            if sample[0] > since_s:
                break
            before = sample
        elapsed_s = seen.now_s - before[0]
        return (seen.totals.in_flight_s - before[1]) / elapsed_s if elapsed_s > 0 else float(seen.totals.in_flight)
