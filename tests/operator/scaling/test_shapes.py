"""Shapes of traffic in a closed loop: pods that start, queues, and the autoscaler by predicted capacity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from harness.world.simulated_service import Moment, Sample, SimulatedService
from llmservice_operator.api.autoscaling_spec import ScaleDown
from llmservice_operator.api.resource import LLMService
from llmservice_operator.scaling.capacity import ReplicaModel, work_of
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.policy import ScalingRules
from llmservice_operator.sizing import Sized

pytestmark = pytest.mark.slow

REQUEST = Demand(1, 1000, 200)
SLOTS = 8
"""Of a simulated pod."""

SHAPES: dict[str, Callable[[float], float]] = {
    "steady": lambda _: 5.0,
    "step up": lambda at_s: 3.0 if at_s < 1200 else 8.0,
    "step down": lambda at_s: 8.0 if at_s < 1200 else 3.0,
    "ramp": lambda at_s: 2.0 + 6.0 * min(1.0, at_s / 2400),
    "flash crowd": lambda at_s: 12.0 if 1200 <= at_s < 1500 else 3.0,
    "daily cycle": lambda at_s: 5.0 - 3.0 * math.cos(2 * math.pi * at_s / 3600),
    "on and off": lambda at_s: 8.0 if int(at_s / 600) % 2 else 2.0,
    "slow leak": lambda at_s: 4.0 + 2.0 * at_s / 3600,
}
"""Load over time, in replicas that would be busy all the time."""


def turns(samples: Sequence[Sample]) -> list[float]:
    """When the direction of the changes turns."""
    changes = [
        (after.at_s, after.replicas > before.replicas)
        for before, after in pairwise(samples)
        if after.replicas != before.replicas
    ]
    return [later[0] for earlier, later in pairwise(changes) if earlier[1] != later[1]]


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, float], list[Sample]]:
    return {}


@pytest.fixture(params=[60.0, 600.0], ids=["starts in a minute", "starts in ten minutes"])
def startup_s(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def samples(
    shape: str,
    startup_s: float,
    kept: dict[tuple[str, float], list[Sample]],
    gpu_service: Callable[..., LLMService],
    gpu_sized: Sized,
    replica: ReplicaModel,
) -> list[Sample]:
    """An hour; simulated once."""
    work = work_of(REQUEST)
    assert work is not None
    per_s = replica.full(work).requests_per_s
    load = SHAPES[shape]

    def moment_at(at_s: float) -> Moment:
        return Moment(load(at_s) * per_s, service_s=SLOTS / per_s, startup_s=startup_s, request=REQUEST)

    if (shape, startup_s) not in kept:
        service = gpu_service(autoscaling={"minReplicas": 1, "maxReplicas": 60})
        first = math.ceil(load(0) / 0.8)
        simulated = SimulatedService(service, gpu_sized, first, learned_s=startup_s)
        kept[shape, startup_s] = simulated.run(3600, moment_at)
    return kept[shape, startup_s]


@pytest.mark.slow
def test_the_direction_turns_at_most_once_within_the_stabilization(samples: list[Sample], startup_s: float) -> None:
    times = turns(samples)
    stabilization_s = ScalingRules.of(ScaleDown()).with_start(startup_s).stabilization_s

    assert all(later - earlier >= stabilization_s for earlier, later in pairwise(times)), times


def test_what_arrives_is_served_once_replicas_had_time_to_start(
    samples: list[Sample], shape: str, startup_s: float
) -> None:
    """Everything but a jump, and the time after it that a start takes and a queue is finished in.

    Where a start takes ten minutes, the growth of the first ten minutes can't be served by replicas that are added.
    """
    if startup_s == 600 and shape not in {"steady", "slow leak", "step down"}:
        return
    jumps = [at_s for at_s in range(0, 3600, 5) if SHAPES[shape](at_s) > 1.2 * SHAPES[shape](max(0, at_s - 5))]
    calm = [one for one in samples if not any(0 <= one.at_s - jump <= 2 * startup_s + 300 for jump in jumps)]

    assert max((sample.waiting / sample.ready for sample in calm), default=0.0) < 1.0


def test_replicas_stay_near_what_the_load_needs(samples: list[Sample], shape: str, startup_s: float) -> None:
    """Over the hour, against the load of the last five minutes at 80 %: what stabilisation keeps counts as needed."""
    load = SHAPES[shape]
    spent = sum(sample.replicas for sample in samples)
    needed = sum(
        max(math.ceil(load(max(0.0, sample.at_s - back)) / 0.8) for back in range(0, 301, 10)) for sample in samples
    )

    assert 0.85 <= spent / needed <= (1.25 if startup_s == 60 else 1.45)


def test_every_decision_has_reasons_and_a_forecast(samples: list[Sample]) -> None:
    assert all(sample.decision.reasons for sample in samples)
    assert all(sample.decision.forecast is not None for sample in samples[1:])
