"""A service in simulated time: requests are a fluid, pods start, crash and fall silent, and the operator's functions
decide. Nothing sleeps; a day takes seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from llmservice_operator.api.resource import LLMService
from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.scaling.decision import Decision, ScalingState, decide_replicas
from llmservice_operator.scaling.demand import NO_DEMAND, Demand
from llmservice_operator.scaling.load import Load, Scrape, load_of
from llmservice_operator.scaling.supply import StartupTimes, supply_of
from llmservice_operator.sizing import Sized

_BEGAN_S = 1_700_000_000.0
_BUCKETS = (0.5, 1.0, 2.0, 2.5, 3.0, 4.0, 5.0, 10.0, 30.0, 60.0, math.inf)
_SLOTS = 8


@dataclass(frozen=True)
class Moment:
    """What happens to the service at one time."""

    arrivals_per_s: float = 0.0
    service_s: float = 8.0
    """Time that a running request takes; a full pod finishes `8 / service_s` requests per second."""
    ttft_s: float = 0.5
    """Time to the first token of a request that does not wait."""
    startup_s: float = 60.0
    blind: bool = False
    """Whether no metrics can be read."""
    silent: Callable[[int], bool] = lambda _: False
    """Which ready pods, by number, do not answer."""
    crashing: bool = False
    """Whether every second pod crashes."""
    hanging: bool = False
    """Whether every second pod does not become ready, for no visible reason."""
    quota: int = 1000
    """Pods that the namespace may have."""
    batch_waiting: float = 0.0
    """Batch requests that wait on every pod, and fill every slot that is left."""
    request: Demand | None = None
    """The tokens of each request; None: the servers count no arrivals."""
    lanes: bool = True
    """Whether servers tell the lane of what runs."""
    set_by_s: float = 0.0
    """How far the wall clock is ahead."""


@dataclass(frozen=True)
class Sample:
    """What came of one tick."""

    at_s: float
    replicas: int
    ready: int
    waiting: float
    decision: Decision


@dataclass
class _Pod:
    number: int
    created_s: float
    ready_s: float = math.inf
    in_flight: float = 0.0
    finished: float = 0.0
    arrived: float = 0.0
    first_tokens: dict[float, float] = field(default_factory=lambda: dict.fromkeys(_BUCKETS, 0.0))
    scrapes: deque[Scrape] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return f"pod-{self.number}"

    def faulty(self, moment: Moment) -> bool:
        return (moment.crashing or moment.hanging) and self.number % 2 == 1

    def seen(self, now: float, moment: Moment) -> Pod:
        ready = now >= self.ready_s
        crashed = moment.crashing and self.faulty(moment) and now > self.created_s + 10
        return Pod(
            self.name,
            self.name,
            f"10.0.0.{self.number}",
            self.created_s,
            ready=ready,
            terminating=False,
            ready_since_s=self.ready_s if ready else None,
            trouble=Trouble("CrashLoopBackOff", "the server ended with exit status 1") if crashed else None,
        )

    def serve(self, arriving: float, tick_s: float, moment: Moment) -> None:
        """Take in what arrives, and finish what the slots finish in a tick."""
        capacity_per_s = _SLOTS / moment.service_s
        before = self.in_flight + arriving
        settled = before / (1 + tick_s / moment.service_s)
        self.in_flight = max(settled, before - capacity_per_s * tick_s)
        self.finished += before - self.in_flight
        wait_s = max(0.0, self.in_flight - _SLOTS) / capacity_per_s
        first_tokens = min(arriving, capacity_per_s * tick_s)
        for bound in _BUCKETS:
            if moment.ttft_s + wait_s <= bound:
                self.first_tokens[bound] += first_tokens
        if moment.batch_waiting:
            self.finished += max(0.0, _SLOTS - self.in_flight) / moment.service_s * tick_s

    def _served(self, running: float, request: Demand) -> Demand:
        """Prompts are computed at once, and answers evenly while they run."""
        begun, ended = request.scaled(self.finished + running), request.scaled(self.finished)
        return Demand(begun.requests, begun.prompt_tokens, ended.output_tokens)

    def scrape(self, now: float, moment: Moment) -> Scrape:
        running, batch = min(self.in_flight, _SLOTS), 0.0
        if moment.batch_waiting:
            batch = _SLOTS - running
        return Scrape(
            now,
            running=running + batch,
            waiting=self.in_flight - running + moment.batch_waiting,
            finished=self.finished,
            answered=self.finished,
            ttft_buckets=tuple(sorted(self.first_tokens.items())),
            batch_waiting=moment.batch_waiting,
            batch_running=batch if moment.lanes else None,
            arrived=moment.request and moment.request.scaled(self.arrived),
            served=self._served(running, moment.request) if moment.request else NO_DEMAND,
        )


class SimulatedService:
    """One service with its Deployment; `replicas` are there, ready, in the beginning.

    `learned_s` is the start-up time that is known by then.
    """

    def __init__(
        self, service: LLMService, sized: Sized, replicas: int, *, learned_s: float = 60.0, tick_s: float = 5.0
    ) -> None:
        self._service = service
        self._sized = sized
        self._tick_s = tick_s
        self._now = _BEGAN_S
        self._replicas = replicas
        self._pods = [_Pod(number, _BEGAN_S - 60, _BEGAN_S) for number in range(replicas)]
        self._born = replicas
        self._startup = StartupTimes(learned_s, replicas)
        self._state: ScalingState | None = None

    def run(self, duration_s: float, moment_at: Callable[[float], Moment]) -> list[Sample]:
        """Tick for `duration_s`; `moment_at` is given the seconds since the beginning."""
        end_s = self._now + duration_s
        samples = []
        while self._now < end_s:
            self._now += self._tick_s
            samples.append(self._tick(moment_at(self._now - _BEGAN_S)))
        return samples

    def _tick(self, moment: Moment) -> Sample:
        self._start_pods(moment)
        self._spread(moment)
        seen = [pod.seen(self._now, moment) for pod in self._pods]
        load = None if moment.blind else self._measure(moment)
        wall_s, steady_s = self._now + moment.set_by_s, self._now - _BEGAN_S
        self._startup.observe(seen, wall_s, steady_s)
        deployment = {"spec": {"replicas": self._replicas}, "status": self._denied(moment)}
        supply = supply_of(deployment, seen, self._startup)
        decision, self._state = decide_replicas(self._service, self._sized, load, supply, self._state, wall_s, steady_s)
        self._scale(decision.replicas, moment)
        waiting = sum(max(0.0, pod.in_flight - _SLOTS) for pod in self._pods)
        ready = sum(pod.ready for pod in seen)
        return Sample(steady_s, decision.replicas, ready, waiting, decision)

    def _start_pods(self, moment: Moment) -> None:
        for pod in self._pods:
            if pod.faulty(moment):
                pod.ready_s, pod.in_flight = math.inf, 0.0
            elif math.isinf(pod.ready_s) and self._now >= pod.created_s + moment.startup_s:
                pod.ready_s = self._now
                arrived = moment.request and moment.request.scaled(0.0)
                pod.scrapes.append(Scrape(self._now - self._tick_s, 0.0, 0.0, arrived=arrived))

    def _spread(self, moment: Moment) -> None:
        """As a gateway does: what waits and what arrives goes to the pods with least in flight, to a common level."""
        ready = sorted((pod for pod in self._pods if self._now >= pod.ready_s), key=lambda pod: pod.in_flight)
        arriving = moment.arrivals_per_s * self._tick_s
        for pod in ready:
            pod.arrived += moment.arrivals_per_s * self._tick_s / len(ready)
            arriving += max(0.0, pod.in_flight - _SLOTS)
            pod.in_flight = min(pod.in_flight, _SLOTS)
        sums = accumulate(pod.in_flight for pod in ready)
        level = min(((arriving + held) / number for number, held in enumerate(sums, 1)), default=0.0)
        for pod in ready:
            pod.serve(max(0.0, level - pod.in_flight), self._tick_s, moment)

    def _measure(self, moment: Moment) -> Load | None:
        histories: dict[str, deque[Scrape]] = {}
        ready = [pod for pod in self._pods if self._now >= pod.ready_s]
        for pod in ready:
            if moment.silent(pod.number):
                continue
            scrape = pod.scrape(self._now, moment)
            if pod.scrapes and pod.scrapes[-1].ttft_buckets == scrape.ttft_buckets:
                scrape = replace(scrape, ttft_buckets=pod.scrapes[-1].ttft_buckets)
            pod.scrapes.append(scrape)
            while pod.scrapes[0].time_s < self._now - 60:
                pod.scrapes.popleft()
            histories[pod.name] = pod.scrapes
        return load_of(
            {name: list(scrapes) for name, scrapes in histories.items()}, [pod.name for pod in ready], "pods"
        )

    def _denied(self, moment: Moment) -> Mapping[str, Any]:
        message = "pods are forbidden: exceeded quota: gpus"
        failure = {"type": "ReplicaFailure", "status": "True", "message": message}
        return {"conditions": [failure] if self._replicas > moment.quota else []}

    def _scale(self, replicas: int, moment: Moment) -> None:
        """What the Deployment's controller does: those that do not serve go first, then the least busy."""
        self._replicas = replicas
        while len(self._pods) > replicas:
            self._pods.remove(max(self._pods, key=lambda pod: (pod.ready_s > self._now, -pod.in_flight)))
        while len(self._pods) < min(replicas, moment.quota):
            self._pods.append(_Pod(self._born, self._now))
            self._born += 1
