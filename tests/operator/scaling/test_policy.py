from __future__ import annotations

from typing import Literal

import pytest

from llmservice_operator.api.autoscaling_spec import Autoscaling
from llmservice_operator.api.spec import Slo
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import Load, PodLoad
from llmservice_operator.scaling.policy import ScalePolicy, ScalingRules

NOW = 1_000_000.0
Changes = tuple[tuple[float, int], ...]


def step(replicas: int = 0, percent: int = 0, cooldown_s: float = 0.0) -> ScalingRules:
    return ScalingRules(replicas=replicas, percent=percent, period_s=60.0, cooldown_s=cooldown_s)


@pytest.mark.parametrize(
    ("allowed", "current", "changes", "most"),
    [
        pytest.param(step(replicas=2), 3, (), 5, id="so many replicas"),
        pytest.param(step(percent=50), 3, (), 5, id="a share, rounded up"),
        pytest.param(step(replicas=4, percent=100), 10, (), 20, id="the larger of the two"),
        pytest.param(step(replicas=4, percent=100), 0, (), 4, id="a share of nothing is nothing"),
        pytest.param(step(replicas=2), 5, ((NOW - 30, 2),), 5, id="what the period added counts"),
        pytest.param(step(replicas=3), 4, ((NOW - 30, 1),), 6, id="and leaves the rest"),
        pytest.param(step(replicas=2), 5, ((NOW - 60, 2),), 7, id="until the period is over"),
        pytest.param(step(replicas=2), 3, ((NOW - 30, -2),), 7, id="what the period removed may come back"),
        pytest.param(step(replicas=9, cooldown_s=90), 5, ((NOW - 80, -1),), 5, id="nothing while cooling down"),
        pytest.param(step(replicas=9, cooldown_s=90), 5, ((NOW - 90, -1),), 14, id="then again"),
    ],
)
def test_replicas_are_added_in_steps(allowed: ScalingRules, current: int, changes: Changes, most: int) -> None:
    assert allowed.highest(current, History(changes=changes), NOW) == most


@pytest.mark.parametrize(
    ("allowed", "current", "changes", "fewest"),
    [
        pytest.param(step(replicas=2), 5, (), 3, id="so many replicas"),
        pytest.param(step(percent=50), 5, (), 2, id="a share, rounded up: one goes in any case"),
        pytest.param(step(percent=100), 5, (), 0, id="all at once"),
        pytest.param(step(replicas=9), 5, (), 0, id="never below none"),
        pytest.param(step(replicas=2), 3, ((NOW - 30, -2),), 3, id="what the period removed counts"),
        pytest.param(step(replicas=1), 3, ((NOW - 30, -2),), 3, id="a step that was limited takes nothing back"),
        pytest.param(step(replicas=9, cooldown_s=90), 5, ((NOW - 80, 1),), 5, id="nothing while cooling down"),
    ],
)
def test_replicas_are_removed_in_steps(allowed: ScalingRules, current: int, changes: Changes, fewest: int) -> None:
    assert allowed.lowest(current, History(changes=changes), NOW) == fewest


def policy(batch: Literal["fill", "scale"]) -> ScalePolicy:
    return ScalePolicy.of(Autoscaling(max_replicas=4, batch=batch), Slo(), max_num_seqs=8)


def load(*pods: PodLoad) -> Load:
    return Load("pods", pods, batch=True, arrivals_per_s=5.0, capacity_per_s=1.0, ttft_p99_s=60.0, ttft_count=100)


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param(PodLoad("a", 8, 100, 0.8, 100, 6), (2, 0, 0.2), id="two of eight count"),
        pytest.param(PodLoad("a", 8, 103, 0.8, 100, 0), (8, 3, 0.8), id="batch requests that only wait"),
        pytest.param(PodLoad("a", 8, 100, 0.9, 100, None), (6.4, 0, 0.8), id="lanes untold: no more than the target"),
        pytest.param(PodLoad("a", 5, 100, 0.5, 100, None), (5, 0, 0.5), id="nor more than there is"),
        pytest.param(PodLoad("a", 8, 103, 0.9, 100, None), (8, 3, 0.9), id="what waits beside them has the slots"),
        pytest.param(PodLoad("a", 8, 0, 0.9, 0, None), (8, 0, 0.9), id="nothing of the batch lane waits"),
        pytest.param(PodLoad("a", 0, 4, 0.0, 4, 0), (0, 0, 0.0), id="nothing runs yet"),
    ],
)
def test_batch_requests_fill_what_the_others_leave(pod: PodLoad, expected: tuple[float, float, float]) -> None:
    [left] = policy("fill").counted(load(pod)).pods

    assert (left.running, left.waiting, left.kv_usage) == pytest.approx(expected)


def test_rates_of_all_lanes_say_nothing_about_one() -> None:
    mixed = load(PodLoad("a", 8, 100, 0.8, 100, 6))

    left = policy("fill").counted(mixed)

    assert (left.arrivals_per_s, left.ttft_p99_s, left.ttft_count) == (None, None, 0)
    assert left.capacity_per_s == 1.0


def test_all_requests_count_where_they_are_to_or_where_there_are_none_of_the_batch_lane() -> None:
    mixed, plain = load(PodLoad("a", 8, 100, 0.8, 100, 6)), Load("pods", (PodLoad("a", 8, 100, 0.8),))

    assert policy("scale").counted(mixed) is mixed
    assert policy("fill").counted(plain) is plain
