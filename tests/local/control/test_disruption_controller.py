from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmservice_local.control.disruption_controller import budget_status

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def budget(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "b", "generation": 3}, "spec": spec, "status": status or {}}


def pods(ready: int, unready: int = 0, going: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(ready + unready + going):
        marked = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if number >= ready + unready else {}
        condition = {"type": "Ready", "status": str(number < ready or number >= ready + unready)}
        found.append({"metadata": {"name": f"p{number}", **marked}, "status": {"conditions": [condition]}})
    return found


@pytest.mark.parametrize(
    ("spec", "there", "expected", "desired", "allowed"),
    [
        ({"maxUnavailable": 1}, pods(3), 3, 2, 1),
        ({"maxUnavailable": 1}, pods(1), 1, 0, 1),
        ({"maxUnavailable": 1}, pods(2, unready=1), 3, 2, 0),
        ({"maxUnavailable": 1}, pods(2, going=1), 3, 2, 0),
        ({"maxUnavailable": 1}, pods(0), 0, 0, 0),
        ({"maxUnavailable": "25%"}, pods(5), 5, 3, 2),
        ({"minAvailable": 1}, pods(1), 1, 1, 0),
        ({"minAvailable": "50%"}, pods(3), 3, 2, 1),
    ],
)
def test_allowed_disruptions_are_the_ready_pods_beyond_the_minimum(
    spec: dict[str, Any], there: list[dict[str, Any]], expected: int, desired: int, allowed: int
) -> None:
    status = budget_status(budget(**spec), there, expected, NOW)

    assert (status["desiredHealthy"], status["disruptionsAllowed"]) == (desired, allowed)
    assert status["observedGeneration"] == 3
    assert status["conditions"][0]["status"] == ("True" if allowed else "False")


@pytest.mark.parametrize(("age_s", "counted"), [(0, False), (119, False), (121, True)])
def test_a_pod_whose_eviction_was_granted_is_no_longer_healthy_until_that_is_long_ago(
    age_s: int, counted: bool
) -> None:
    since = (NOW - timedelta(seconds=age_s)).isoformat().replace("+00:00", "Z")

    status = budget_status(budget({"disruptedPods": {"p0": since}}, maxUnavailable=1), pods(2), 2, NOW)

    assert status["currentHealthy"] == (2 if counted else 1)
    assert bool(status["disruptedPods"]) is not counted


def test_the_same_input_gives_the_same_status() -> None:
    first = budget_status(budget(maxUnavailable=1), pods(2), 2, NOW)

    assert budget_status(budget(first, maxUnavailable=1), pods(2), 2, NOW + timedelta(hours=1)) == first
