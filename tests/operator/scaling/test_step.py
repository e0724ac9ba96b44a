from __future__ import annotations

import pytest

from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.step import ScaleStep, highest, lowest

NOW = 1_000_000.0
Changes = tuple[tuple[float, int], ...]


def step(replicas: int = 0, percent: int = 0, cooldown_s: float = 0.0) -> ScaleStep:
    return ScaleStep(replicas=replicas, percent=percent, period_s=60.0, cooldown_s=cooldown_s)


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
def test_replicas_are_added_in_steps(allowed: ScaleStep, current: int, changes: Changes, most: int) -> None:
    assert highest(current, allowed, History(changes=changes), NOW) == most


@pytest.mark.parametrize(
    ("allowed", "current", "changes", "fewest"),
    [
        pytest.param(step(replicas=2), 5, (), 3, id="so many replicas"),
        pytest.param(step(percent=50), 5, (), 2, id="a share, rounded up: one goes in any case"),
        pytest.param(step(percent=100), 5, (), 0, id="all at once"),
        pytest.param(step(replicas=9), 5, (), 0, id="never below none"),
        pytest.param(step(replicas=2), 3, ((NOW - 30, -2),), 3, id="what the period removed counts"),
        pytest.param(step(replicas=1), 3, ((NOW - 30, -2),), 3, id="a step that was narrowed takes nothing back"),
        pytest.param(step(replicas=9, cooldown_s=90), 5, ((NOW - 80, 1),), 5, id="nothing while cooling down"),
    ],
)
def test_replicas_are_removed_in_steps(allowed: ScaleStep, current: int, changes: Changes, fewest: int) -> None:
    assert lowest(current, allowed, History(changes=changes), NOW) == fewest
