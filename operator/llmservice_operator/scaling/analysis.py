"""The load in units of replicas: what is in flight and what arrives."""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_operator.scaling.forecast import Forecast
from llmservice_operator.scaling.load import Load
from llmservice_operator.scaling.policy import TARGET_UTILIZATION, ScalePolicy
from llmservice_operator.scaling.supply import Supply


@dataclass(frozen=True, slots=True)
class Analysis:
    """The load in units of replicas; None where it is unknown."""

    queue: float | None
    """Replicas that hold what is in flight with at most `queue_depth` waiting each, soon; None without a queue."""
    busy: float
    """Full replicas that hold what runs, by slots or by KV cache, whichever is fuller."""
    utilization: float
    """Replicas that hold what runs at 80 % of their slots, or of their KV cache where that is fuller."""
    arrivals: float | None
    """Replicas that keep up with the arrivals at 80 % of a replica's capacity."""
    capacity_per_s: float | None
    forecast: Forecast | None = None
    """None where the servers count no arrivals, or where a replica's capacity is unknown."""

    @property
    def is_predicted(self) -> bool:
        """Whether the capacity of a replica is known before one was full."""
        capacity = self.forecast.capacity if self.forecast else None
        return capacity is not None and capacity.source == "predicted"


def analyse(
    load: Load,
    slots: float,
    supply: Supply,
    policy: ScalePolicy,
    capacity_per_s: float | None,
    forecast: Forecast | None = None,
) -> Analysis:
    """Put the load into units of replicas; pods whose metrics are missing are assumed to be like the others.

    `slots` is what one replica really runs at once. A queue asks for the replicas that hold all that is in flight, or
    for those that finish it in the time that a new one takes to start, whichever are fewer: any more would be idle by
    the time that they serve.
    """
    busy = busy_replicas(load, policy)
    utilization = busy / TARGET_UTILIZATION
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
    return Analysis(queue if load.waiting else None, busy, utilization, arrivals, capacity_per_s, forecast)


def busy_replicas(load: Load, policy: ScalePolicy) -> float:
    return sum(max(pod.running / policy.max_num_seqs, pod.kv_usage) for pod in load.pods) / load.answered


def used_slots(load: Load, policy: ScalePolicy) -> float:
    """What one replica really runs at once: fewer than its slots where long requests fill the KV cache first."""
    full = [pod.running for pod in load.pods if pod.waiting and pod.kv_usage >= TARGET_UTILIZATION]
    return min(policy.max_num_seqs, max(1.0, sum(full) / len(full))) if full else policy.max_num_seqs
