"""The replicas that serve or will soon: learned start-up times, and how long overloads last until a new pod serves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmservice_operator.api.spec import Manifest
from llmservice_operator.pods.pod import Trouble, pods_denied
from llmservice_operator.scaling.history import LONGEST_GAP_S

UNKNOWN_S = 600.0
"""Until the first pod has started: a model of many GiB takes minutes to load."""
SHORTEST_S, LONGEST_S = 10.0, 3600.0
_USUAL_S = 60.0
_LAST_FOR_S = 3600.0
_NODE_S = 600.0
"""An autoscaler makes a node in minutes, as a part of a start; a longer wait is for a GPU of which there is none."""
_GROWTH_S = 60.0
"""For how long at most a queue is expected to grow while a replica starts: how long a burst lasts is not known, and
after a start of ten minutes most replicas that were added for a longer one would be idle."""
_KEPT = 32

_OF_ONE_POD = frozenset({"Killed", "EngineFailed", "OOMKilled"})
"""May happen to a single pod while it serves; under an overload it is a reason to add others."""
_A_LOOP = 2
"""Restarts from which on such an end is no accident."""


class Replica(Protocol):
    """What is read of a pod: `pods.pod.Pod`, or a replica of a simulation."""

    @property
    def uid(self) -> str: ...
    @property
    def created_s(self) -> float: ...
    @property
    def scheduled_s(self) -> float | None: ...
    @property
    def ready(self) -> bool: ...
    @property
    def ready_since_s(self) -> float | None: ...
    @property
    def restarts(self) -> int: ...
    @property
    def terminating(self) -> bool: ...
    @property
    def serves(self) -> bool: ...
    @property
    def trouble(self) -> Trouble | None: ...


class StartupTimes:
    """The last start-up times; after a restart of the operator, the P90 that the status kept.

    `learned_s` is that P90, and `measured` the number of ready pods in the status: they were ready first.
    """

    def __init__(self, learned_s: float | None = None, measured: int = 0) -> None:
        self._learned_s = learned_s
        self._measured = measured
        self._samples: dict[str, float] = {} if learned_s is None else {"status": float(learned_s)}
        self.last_s: tuple[float, float] | None = None
        """The P90 before the start-up that was last measured, and what that one took; None before the second.

        An hour later, when it is no news any more, None again.
        """
        self._last_at_s = 0.0
        self._ages: dict[str, float] = {}
        self._observed_s: float | None = None

    def observe(self, pods: Sequence[Replica], now: float, steady_s: float) -> None:
        """Learn from pods that are ready for the first time, and track the others' age.

        `now` is the clock of the pods' timestamps, `steady_s` is monotonic. A pod's age is the time for which it was
        observed on a node, so that setting the clock makes no pod overdue. Only the age of pods that exist at the first
        observation is taken from their timestamps; of those that the status counts as ready by then its P90 is taken,
        which includes them. A long wait for a node says nothing about the next pod.
        """
        gap_s = None if self._observed_s is None else steady_s - self._observed_s
        observed_s = gap_s if gap_s is not None and 0 <= gap_s <= LONGEST_GAP_S else 0.0
        first = gap_s is None
        placed = [pod for pod in pods if not _unschedulable(pod)]
        ages = {pod.uid: max(0.0, now - _began_s(pod)) if first else 0.0 for pod in placed}
        self._ages = {uid: self._ages[uid] + observed_s if uid in self._ages else age for uid, age in ages.items()}
        self._observed_s = steady_s
        started = [
            (pod.ready_since_s, pod.uid, _began_s(pod))
            for pod in pods
            if pod.ready and pod.ready_since_s is not None and not pod.restarts
        ]
        for number, (ready_s, uid, began_s) in enumerate(sorted(started)):
            if uid in self._samples:
                continue
            if first and self._learned_s is not None and number < self._measured:
                self._samples[uid] = self._learned_s
                continue
            predicted_s, took_s = self.p90_s, max(0.0, ready_s - began_s)
            self.last_s = None if predicted_s is None else (predicted_s, took_s)
            self._last_at_s = steady_s
            self._samples[uid] = took_s
        if steady_s - self._last_at_s > _LAST_FOR_S:
            self.last_s = None
        for surplus in list(self._samples)[:-_KEPT]:
            del self._samples[surplus]

    @property
    def p90_s(self) -> float | None:
        """Nine in ten pods were ready within this time (nearest rank); None before the first."""
        return _p90(self._samples.values())

    @property
    def patience_s(self) -> float:
        """How long a pod that is not ready counts as supply."""
        learned = self.p90_s
        return UNKNOWN_S if learned is None else min(max(learned, SHORTEST_S), LONGEST_S)

    def overdue(self, pod: Replica) -> bool:
        """Whether a pod that is not ready takes longer than others did."""
        return self.age_s(pod) > self.patience_s

    def age_s(self, pod: Replica) -> float:
        return self._ages.get(pod.uid, 0.0)

    def lead_s(self, starting: Sequence[Replica]) -> float:
        """How long a replica takes until it serves: as long as others did, or as those that are still starting."""
        usual_s = _USUAL_S if self.p90_s is None else self.p90_s
        return min(max(SHORTEST_S, usual_s, *map(self.age_s, starting)), LONGEST_S)


def _p90(seconds: Iterable[float]) -> float | None:
    """Nearest rank; None of none."""
    ordered = sorted(seconds)
    return ordered[-(-9 * len(ordered) // 10) - 1] if ordered else None


@dataclass(frozen=True, slots=True)
class Supply:
    """The replicas there are."""

    replicas: int
    """What the Deployment is set to now."""
    ready: int
    starting: int = 0
    """Not ready, younger than the learned start-up time: they will serve soon."""
    overdue: int = 0
    """Not ready, older than that, although a node has room for them."""
    lead_s: float = 60.0
    """How long a new replica takes until it serves."""
    ahead_s: float = 0.0
    """By how much sooner than a new one the starting replicas serve, together. Each counts as one that serves in
    `_GROWTH_S` at the latest."""
    trouble: str | None = None
    """What keeps pods from starting, if it would keep more of them as well."""

    @property
    def counted(self) -> int:
        """The replicas that serve or will soon."""
        return max(0, self.replicas - self.overdue)

    @property
    def serves_s(self) -> float:
        """Replicas times seconds until a new replica serves."""
        return self.ready * self.lead_s + self.ahead_s


def supply_of(deployment: Manifest | None, pods: Sequence[Replica], startup: StartupTimes) -> Supply:
    """Starting pods count for the time that one takes to start; those that no node has room for keep counting."""
    starting = [pod for pod in pods if not pod.ready and not pod.terminating]
    overdue = [pod for pod in starting if startup.overdue(pod)]
    denied, lead_s = pods_denied(deployment), startup.lead_s(starting)
    return Supply(
        replicas=int((deployment or {}).get("spec", {}).get("replicas", 0)),
        ready=sum(pod.serves for pod in pods),
        starting=len(starting) - len(overdue),
        overdue=len(overdue),
        lead_s=lead_s,
        ahead_s=sum(max(startup.age_s(pod), lead_s - _GROWTH_S) for pod in starting if pod not in overdue),
        trouble=denied.reason if denied else next((reason for pod in starting if (reason := _trouble(pod))), None),
    )


def _began_s(pod: Replica) -> float:
    """When its start began: with the wait for a node, unless that was too long."""
    if pod.scheduled_s is None or pod.scheduled_s - pod.created_s <= _NODE_S:
        return pod.created_s
    return pod.scheduled_s


def _unschedulable(pod: Replica) -> bool:
    return pod.trouble is not None and pod.trouble.reason == "Unschedulable"


def _trouble(pod: Replica) -> str | None:
    """What another pod of the same template would most likely meet as well."""
    if pod.trouble is None or _unschedulable(pod):
        return None
    once = pod.trouble.reason in _OF_ONE_POD and pod.restarts < _A_LOOP
    return None if once else pod.trouble.reason


@dataclass(frozen=True, slots=True)
class OverloadTimer:
    """Measures overloads: from the tick at which the load asks for more replicas than serve, until one more serves."""

    since_s: float | None = None
    serving: int = 0

    def observe(self, wanted: int, serving: int, now_s: float) -> tuple[OverloadTimer, float | None]:
        """The next state, and the overload's length in seconds in the tick that first sees one more pod serve."""
        overloaded = wanted > serving
        if self.since_s is None:  # a service that starts from zero has no overload, it has no pod
            return (OverloadTimer(now_s, serving) if overloaded and serving else self), None
        if serving > self.serving:
            return OverloadTimer(now_s if overloaded else None, serving), now_s - self.since_s
        return OverloadTimer(self.since_s if overloaded else None, min(self.serving, serving)), None
