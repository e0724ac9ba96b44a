"""What the scaler once made of ordinary trouble, case by case, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.simulated_service import Moment, Sample, SimulatedService
from llmservice_operator.api.resource import LLMService
from llmservice_operator.sizing.sizing import Sized

Simulate = Callable[..., list[Sample]]


@pytest.fixture
def simulate(service_of: Callable[..., LLMService], sized: Sized) -> Simulate:
    """Runs a service of at most 60 replicas, by default for an hour."""

    def run(
        moment_at: Moment | Callable[[float], Moment],
        replicas: int = 1,
        duration_s: float = 3600,
        learned_s: float = 60.0,
        **autoscaling: Any,
    ) -> list[Sample]:
        autoscaling = {"minReplicas": 1, "maxReplicas": 60, "queueDepth": 4, **autoscaling}
        service = service_of(autoscaling=autoscaling, slo={"ttftP99": "2s"})
        simulated = SimulatedService(service, sized, replicas, learned_s=learned_s)
        return simulated.run(duration_s, moment_at if callable(moment_at) else lambda _: moment_at)

    return run


def most(samples: list[Sample]) -> int:
    return max(sample.replicas for sample in samples)


def test_a_broken_promise_that_the_load_does_not_explain_adds_no_replica(simulate: Simulate) -> None:
    """One request at a time, whose first token takes three seconds."""
    one_at_a_time = Moment(arrivals_per_s=0.4, service_s=2.5, ttft_s=2.6)

    assert most(simulate(one_at_a_time, duration_s=1260)) == 1


@pytest.mark.parametrize(
    ("learned_s", "expected"),
    [pytest.param(600.0, 12, id="as pods did before"), pytest.param(60.0, 16, id="longer than ever before")],
)
def test_a_slow_start_asks_for_what_clears_the_backlog_in_that_time(
    learned_s: float, expected: int, simulate: Simulate
) -> None:
    """5.6 requests per second need seven replicas at 80 %, and a pod takes ten minutes to start."""

    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=0.5 if at_s < 300 else 5.6, startup_s=600)

    samples = simulate(moment_at, duration_s=2 * 3600, learned_s=learned_s)

    assert 7 <= most(samples) <= expected
    assert samples[-1].replicas == 7
    assert samples[-1].waiting == 0


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(Moment(7.8, crashing=True), 10, id="pods crash: more of them would crash as well"),
        pytest.param(Moment(14.0, quota=10), 18, id="the quota is used up: the load asks for 18, the queue for none"),
        pytest.param(Moment(7.8, hanging=True), 16, id="pods hang, nobody knows why: one step more than the queue's"),
    ],
)
def test_pods_that_do_not_start_are_not_replaced_without_end(fault: Moment, expected: int, simulate: Simulate) -> None:
    """Ten replicas hold the load; from the fifth minute on half of them don't serve, and requests queue up."""
    samples = simulate(lambda at_s: Moment(7.8) if at_s < 300 else fault, replicas=10, duration_s=3600)

    assert 10 <= most(samples) <= expected


def test_one_low_reading_of_the_capacity_asks_for_no_replicas(simulate: Simulate) -> None:
    """The pods stall for half a minute, as they do when kernels are compiled."""

    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=2.3, service_s=8.0 if not 600 < at_s <= 630 else 400.0)

    samples = simulate(moment_at, replicas=3, duration_s=2 * 3600)

    assert most(samples) <= 8
    assert samples[-1].replicas <= 4


@pytest.mark.parametrize("every", [2, 3])
def test_metrics_that_are_there_every_other_tick_are_enough_to_grow_and_to_shrink(
    every: int, simulate: Simulate
) -> None:
    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=3.0 if at_s < 1200 else 0.2, blind=bool(at_s / 5 % every))

    samples = simulate(moment_at, duration_s=2400)

    assert max(sample.replicas for sample in samples if sample.at_s < 300) >= 4
    assert samples[-1].replicas == 1


@pytest.mark.parametrize("replicas", [3, 40])
def test_one_failed_scrape_in_a_hundred_does_not_keep_idle_replicas(replicas: int, simulate: Simulate) -> None:
    ticks = iter(range(10**6))

    samples = simulate(Moment(arrivals_per_s=0.1, silent=lambda _: next(ticks) % 100 == 0), replicas, duration_s=900)

    assert samples[-1].replicas == 1


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize(("batch", "expected"), [(None, 1), ("fill", 1), ("scale", 12)])
def test_an_endless_batch_backlog_adds_replicas_only_where_it_is_to(
    batch: str | None, expected: int, lanes: bool, simulate: Simulate
) -> None:
    """With and without servers that tell the lane of what runs."""
    backlog = Moment(arrivals_per_s=0.5, batch_waiting=500, lanes=lanes)
    mode = {} if batch is None else {"batch": batch}

    assert most(simulate(backlog, maxReplicas=12, duration_s=1200, **mode)) == expected


def test_interactive_requests_scale_beside_a_batch_backlog(simulate: Simulate) -> None:
    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=3.0 if at_s < 1800 else 0.3, batch_waiting=500)

    samples = simulate(moment_at)

    assert samples[300].replicas == 4
    assert most(samples) <= 12
    assert samples[-1].replicas == 1


@pytest.mark.parametrize("set_by_s", [-3600.0, -110.0, 110.0, 3600.0])
def test_a_clock_that_is_set_shrinks_nothing_early(set_by_s: float, simulate: Simulate) -> None:
    """The load goes at 600 s and the clock is set at 650 s; five minutes have to pass in any case."""

    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=3.0 if at_s < 600 else 0.1, set_by_s=0.0 if at_s < 650 else set_by_s)

    def shrunk_s(samples: list[Sample]) -> float:
        return next(sample.at_s for sample in samples if sample.at_s > 600 and sample.replicas < 4)

    assert shrunk_s(simulate(moment_at, replicas=4)) == shrunk_s(
        simulate(lambda at_s: replace(moment_at(at_s), set_by_s=0.0), replicas=4)
    )
