"""A day of one service in simulated time: steady load, a flash crowd, missing metrics, a crash loop, slow starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import pytest

from harness.world.simulated_service import Moment, Sample, SimulatedService
from llmservice_operator.api.resource import LLMService
from llmservice_operator.sizing import Sized

pytestmark = pytest.mark.slow

HOUR = 3600.0
AUTOSCALING = {"minReplicas": 2, "maxReplicas": 40, "queueDepth": 4}


@dataclass(frozen=True)
class Phase:
    """A time of the day, and what the replicas may do in it."""

    from_h: float
    needed: int
    """Replicas that hold the load at 80 %, and that are to be there in the end."""
    most: int
    """The most that may be asked for meanwhile."""
    reversals: int
    """How often it may change between adding and removing: an overload is one reversal up and one down."""


DAY = {
    "steady": Phase(0, needed=4, most=5, reversals=0),
    "flash crowd": Phase(3, needed=15, most=30, reversals=1),
    "after the crowd": Phase(5, needed=4, most=30, reversals=0),
    "metrics missing every other tick": Phase(7, needed=7, most=12, reversals=2),
    "one scrape in a hundred failing": Phase(9, needed=4, most=12, reversals=0),
    "no metrics": Phase(11, needed=4, most=4, reversals=0),
    "crash loop": Phase(12, needed=8, most=10, reversals=1),
    "recovery": Phase(14, needed=4, most=40, reversals=1),  # 9,000 requests are to be finished within a minute
    "slow start": Phase(16, needed=7, most=13, reversals=1),
    "batch backlog": Phase(19, needed=4, most=12, reversals=0),
    "one at a time, slower than the target": Phase(21, needed=2, most=8, reversals=0),
    "idle, clock set ahead": Phase(23, needed=2, most=2, reversals=0),
    "end": Phase(24, needed=2, most=2, reversals=0),
}


def phase_at(at_s: float) -> str:
    return [name for name, phase in DAY.items() if phase.from_h * HOUR < at_s][-1]


def moment_at(at_s: float) -> Moment:
    tick, swing = round(at_s / 10), 1 + 0.05 * math.sin(at_s / 97)
    steady = Moment(arrivals_per_s=3.0 * swing)
    return {
        "steady": steady,
        "flash crowd": Moment(arrivals_per_s=12.0 * swing),
        "after the crowd": steady,
        "metrics missing every other tick": Moment(arrivals_per_s=5.4 * swing, blind=tick % 2 == 0),
        "one scrape in a hundred failing": Moment(
            steady.arrivals_per_s, silent=lambda pod: (tick + 7 * pod) % 100 == 0
        ),
        "no metrics": Moment(arrivals_per_s=3.0 * swing, blind=True),
        "crash loop": Moment(arrivals_per_s=6.2 * swing, crashing=True),
        "recovery": steady,
        "slow start": Moment(arrivals_per_s=5.4 * swing, startup_s=600),
        "batch backlog": Moment(arrivals_per_s=3.0 * swing, batch_waiting=500),
        "one at a time, slower than the target": Moment(arrivals_per_s=0.4, service_s=2.5, ttft_s=2.6),
        "idle, clock set ahead": Moment(arrivals_per_s=0.1, set_by_s=110.0),
        "end": Moment(),
    }[phase_at(at_s)]


def reversals(samples: Sequence[Sample]) -> int:
    """How often the replicas changed from growing to shrinking or back."""
    ways = [
        math.copysign(1, after.replicas - before.replicas)
        for before, after in pairwise(samples)
        if after.replicas != before.replicas
    ]
    return max(0, len(list(groupby(ways))) - 1)


@pytest.fixture(scope="module")
def kept() -> dict[str, list[Sample]]:
    return {}


@pytest.fixture
def day(kept: dict[str, list[Sample]], service_of: Callable[..., LLMService], sized: Sized) -> dict[str, list[Sample]]:
    """The samples of each phase; simulated once."""
    if not kept:
        service = service_of(autoscaling=AUTOSCALING, slo={"ttftP99": "2s"})
        samples = SimulatedService(service, sized, 4, tick_s=10.0).run(24 * HOUR, moment_at)
        kept.update({name: list(part) for name, part in groupby(samples, lambda one: phase_at(one.at_s))})
    return kept


@pytest.mark.slow
def test_the_bounds_are_kept_all_day(day: dict[str, list[Sample]]) -> None:
    replicas = [sample.replicas for samples in day.values() for sample in samples]

    assert len(replicas) == 8640
    assert AUTOSCALING["minReplicas"] <= min(replicas) <= max(replicas) <= AUTOSCALING["maxReplicas"]


@pytest.mark.parametrize("name", list(DAY)[:-1])
def test_every_phase_asks_for_what_its_load_needs_and_does_not_flap(name: str, day: dict[str, list[Sample]]) -> None:
    phase, samples = DAY[name], day[name]

    assert samples[-1].replicas - phase.needed in {0, 1}
    assert max(sample.replicas for sample in samples) <= phase.most
    assert reversals(samples) <= phase.reversals
    assert len({sample.replicas for sample in samples[-60:]}) == 1  # at rest for the last ten minutes


def test_the_day_has_no_more_reversals_than_its_phases(day: dict[str, list[Sample]]) -> None:
    samples = [sample for name in list(DAY)[:-1] for sample in day[name]]

    assert reversals(samples) <= 12
