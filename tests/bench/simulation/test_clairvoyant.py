import pytest

from llmservice_bench.simulation.clairvoyant import SLOT_S, Work, clairvoyant, created, needed
from llmservice_bench.simulation.fleet import Fleet, FleetConfig
from llmservice_bench.simulation.observation import Bounds
from llmservice_bench.simulation.outcome import Targets
from llmservice_bench.simulation.policies import Static
from llmservice_bench.simulation.replica import ReplicaConfig
from llmservice_planner.traffic.traces import TraceRequest

BOUNDS = Bounds(1, 6)


def test_replicas_are_created_their_startup_time_ahead_and_stay_where_a_start_takes_longer() -> None:
    assert created([1, 1, 1, 3, 3, 1, 1, 1, 1], 2 * SLOT_S) == [1, 3, 3, 3, 3, 1, 1, 1, 1]
    assert created([3, 1, 1, 3], 2 * SLOT_S) == [3, 3, 3, 3]
    assert created([3, 1, 1, 3], 0.0) == [3, 1, 1, 3]


@pytest.mark.parametrize(
    ("busy", "load", "around", "replicas"),
    [
        ([0.0, 0.5, 1.0], 0.8, 0, [1, 1, 2]),
        ([4.0, 4.0, 4.0], 0.5, 0, [6, 6, 6]),  # the bounds
        ([0.0, 0.0, 3.0], 1.0, 0, [1, 1, 3]),
        ([3.0, 0.0, 3.0, 0.0, 3.0], 1.0, 1, [2, 2, 1, 2, 2]),  # means of 1.5, 2, 1, 2, 1.5
    ],
)
def test_a_slot_needs_the_replicas_that_do_its_work(
    busy: list[float], load: float, around: int, replicas: list[int]
) -> None:
    assert needed(busy, load, BOUNDS, around) == replicas


def test_work_is_conserved_over_the_slots(replica_config: ReplicaConfig) -> None:
    trace = [TraceRequest(number * 0.7, 40, 80) for number in range(50)]
    work = Work.of(replica_config.latency, 8, trace)
    each_s = 40 * 0.00071 + 40 * 41 / 2 * 0.0000017 + 80 * work.step_s / 8
    assert sum(work.by_slot(trace, 120.0)) * SLOT_S == pytest.approx(50 * each_s)


@pytest.mark.slow
def test_the_schedule_keeps_the_promise_with_fewer_gpu_hours_than_any_constant_number(
    replica_config: ReplicaConfig,
) -> None:
    quiet = [TraceRequest(number * 2.0, 20, 40) for number in range(60)]
    crowd = [TraceRequest(60.0 + number * 0.03, 20, 40) for number in range(400)]
    trace = sorted([*quiet, *crowd], key=lambda each: each.arrival_s)
    config, targets = FleetConfig(replica=replica_config, initial=1, startup_s=(10.0,)), Targets(ttft_s=0.5)
    found = clairvoyant(config, trace, BOUNDS, targets, 120.0)
    assert found.outcome.attainment(targets).ttft >= 0.99
    fewest = next(
        number
        for number in range(1, 7)
        if Fleet(config, trace, Static(number), 120.0).run().attainment(targets).ttft >= 0.99
    )
    assert found.outcome.gpu_s < 0.8 * fewest * 120.0
    assert max(found.serving) >= fewest
