"""What a simulation has shown: promises kept, latencies, replicas over time, GPU time and decisions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from llmservice_bench.simulation.latencies import GapHistogram
from llmservice_bench.simulation.requests import SimulatedRequest
from llmservice_operator.scaling.decision import Decision
from llmservice_planner.traffic.lengths import percentile
from llmservice_server.engine.config import LANES


@dataclass(frozen=True, slots=True)
class FleetSize:
    """From this time on."""

    time_s: float
    replicas: int
    """That were asked for."""
    ready: int
    starting: int
    terminating: int


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    time_s: float
    before: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Targets:
    """Of every request; infinite without one."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of all requests that kept the targets; one that did not finish kept none."""

    ttft: float
    itl: float
    both: float


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds from the arrival of requests until they were first scheduled, by nearest rank; None without any."""

    requests: int
    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, waits_s: Sequence[float]) -> Waits:
        mean = sum(waits_s) / len(waits_s) if waits_s else None
        return cls(len(waits_s), mean, percentile_of(waits_s, 0.5), percentile_of(waits_s, 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run under one policy."""

    policy: str
    requests: Sequence[SimulatedRequest]
    """That arrived after the warm-up."""
    gaps: GapHistogram
    """Of these requests."""
    sizes: Sequence[FleetSize]
    decisions: Sequence[DecisionRecord]
    warmup_s: float
    duration_s: float
    """Until the end of the traffic, the warm-up included."""
    gpu_s: float
    """GPU time between the two, from each replica's creation to its end."""
    num_steps: int
    num_preemptions: int

    def attainment(self, targets: Targets) -> Attainment:
        ttft = itl = both = 0
        for request in self.requests:
            if request.outcome != "finished" or request.ttft_s is None:
                continue
            in_time, even = request.ttft_s <= targets.ttft_s, request.keeps_itl
            ttft, itl, both = ttft + in_time, itl + even, both + (in_time and even)
        count = max(1, len(self.requests))
        return Attainment(ttft / count, itl / count, both / count)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome or "open" for request in self.requests)

    def ttft_s(self, share: float) -> float | None:
        """Of the requests that got a token, by nearest rank; None where none did."""
        return percentile_of([request.ttft_s for request in self.requests if request.ttft_s is not None], share)

    def waits(self, lane: str) -> Waits:
        """Of the lane's requests that were scheduled."""
        requests = [request for request in self.requests if request.trace.lane == lane]
        return Waits.of([request.wait_s for request in requests if request.wait_s is not None])

    @property
    def output_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def gpu_hours(self) -> float:
        return self.gpu_s / 3600

    @property
    def changes(self) -> list[DecisionRecord]:
        """The decisions that changed the number of replicas."""
        return [each for each in self.decisions if each.decision.replicas != each.before]

    def turns_within(self, window_s: float) -> int:
        """The most changes of direction (up after down, down after up) in a window of this length after the warm-up."""
        changes = [each for each in self.changes if each.time_s >= self.warmup_s]
        signed = [(each.time_s, each.decision.replicas > each.before) for each in changes]
        turns = [later[0] for earlier, later in pairwise(signed) if earlier[1] != later[1]]
        return max((sum(1 for other in turns if 0 <= other - turn < window_s) for turn in turns), default=0)

    def to_dict(self, targets: Targets) -> dict[str, Any]:
        """For `-o json`; times in seconds."""
        kept, outcomes = self.attainment(targets), self.outcomes
        return {
            "policy": self.policy,
            "requests": len(self.requests),
            "outcomes": {name: outcomes[name] for name in ("finished", "refused", "failed", "timed_out")},
            "within_slo": {"ttft": kept.ttft, "itl": kept.itl, "both": kept.both},
            "ttft_seconds": {f"p{share:g}": self.ttft_s(share / 100) for share in (50, 90, 99)},
            "wait_seconds": {lane: asdict(self.waits(lane)) for lane in LANES},
            "itl_seconds": {f"p{share:g}": self.gaps.percentile(share / 100) for share in (50, 90, 99)},
            "output_tokens": self.output_tokens,
            "warmup_seconds": self.warmup_s,
            "duration_seconds": self.duration_s,
            "gpu_hours": self.gpu_hours,
            "preemptions": self.num_preemptions,
            "replicas": [
                {"time": each.time_s, "replicas": each.replicas, "ready": each.ready, "starting": each.starting}
                for each in self.sizes
            ],
            "decisions": [
                {
                    "time": each.time_s,
                    "from": each.before,
                    "to": each.decision.replicas,
                    "wanted": each.decision.wanted,
                    "reasons": list(each.decision.reasons),
                    "slo_feasible": each.decision.slo and asdict(each.decision.slo),
                }
                for each in self.decisions
            ],
        }


def percentile_of(values: Sequence[float], share: float) -> float | None:
    """By nearest rank; None without any."""
    return percentile(sorted(values), share) if values else None
