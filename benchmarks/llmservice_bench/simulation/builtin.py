"""The operator's own autoscaler in a simulation: its code, unchanged, with scrapes and replicas of simulated time."""

from __future__ import annotations

from collections import deque

from llmservice_bench.simulation.observation import Observation
from llmservice_operator.api import units
from llmservice_operator.scaling.decision import Decision, ScalingState, decide_replicas
from llmservice_operator.scaling.feasibility import Feasibility, feasibility_of
from llmservice_operator.scaling.from_manifest import SizedService
from llmservice_operator.scaling.load import Held, Load, Scrape, load_of
from llmservice_operator.scaling.supply import StartupTimes, supply_of

TICK_S, TICK_JITTER = 5.0, 0.1
"""Of `llmservice operator`."""


class BuiltIn:
    """Does what a pass of the operator does between reading the pods and writing the Deployment."""

    name = "builtin"
    interval_s = TICK_S
    jitter = TICK_JITTER
    wakes = True

    def __init__(self, sized: SizedService) -> None:
        self._sized = sized
        autoscaling = sized.service.spec.autoscaling
        self._window_s = units.seconds(autoscaling.metrics.window) if autoscaling else 60.0
        self._startup = StartupTimes()
        self._scrapes: dict[str, deque[Scrape]] = {}
        self._state: ScalingState | None = None
        self._slo: Feasibility | None = None

    def decide(self, seen: Observation) -> Decision:
        now = seen.now_s
        self._startup.observe(seen.pods, now, now)
        load = self._load(seen)
        service, sized = self._sized.service, self._sized.sized
        self._slo = feasibility_of(service.spec.slo, sized, load, self._slo)
        demand: Load | Held | None = seen.held
        if seen.replicas:
            demand = None if load is None else load.with_held(seen.held.requests)
        supply = supply_of({"spec": {"replicas": seen.replicas}}, seen.pods, self._startup)
        decision, self._state = decide_replicas(service, sized, demand, supply, self._state, now, now, slo=self._slo)
        return decision

    def _load(self, seen: Observation) -> Load | None:
        """Of the scrapes within the window, as the operator keeps them for each pod."""
        self._scrapes = {uid: scrapes for uid, scrapes in self._scrapes.items() if uid in seen.scrapes}
        for uid, scrape in seen.scrapes.items():
            scrapes = self._scrapes.setdefault(uid, deque())
            scrapes.append(scrape)
            while scrapes[0].time_s < seen.now_s - self._window_s:
                scrapes.popleft()
        return load_of(self._scrapes, list(seen.scrapes), "simulated")
