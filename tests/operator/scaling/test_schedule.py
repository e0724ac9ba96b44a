from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from llmservice_operator.api.autoscaling_spec import Autoscaling, ScheduledReplicas
from llmservice_operator.api.spec import Slo
from llmservice_operator.scaling.policy import ScalePolicy
from llmservice_operator.scaling.schedule import GpuHours, policy_at, scheduled

POLICY = ScalePolicy.of(Autoscaling(min_replicas=1, max_replicas=20), Slo(), max_num_seqs=8)
NOON = "2026-11-25T12:00"
"""A Wednesday."""


def at(local: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone)).timestamp()


def entry(start: str, end: str, **fields: Any) -> ScheduledReplicas:
    return ScheduledReplicas.model_validate({"start": start, "end": end, "minReplicas": 4, **fields})


def spent(hours: float, when: str = NOON) -> GpuHours:
    return GpuHours("2026-11-25", hours, at(when))


@pytest.mark.parametrize(
    ("one", "when", "applies"),
    [
        (entry("08:00", "18:00"), "2026-11-25T08:00", True),
        (entry("08:00", "18:00"), "2026-11-25T18:00", False),
        (entry("08:00", "18:00", days=["Mon", "Wed"]), NOON, True),
        (entry("08:00", "18:00", days=["Sat"]), NOON, False),
        (entry("22:00", "06:00"), "2026-11-25T23:00", True),
        (entry("22:00", "06:00"), "2026-11-25T05:59", True),
        pytest.param(entry("22:00", "06:00", days=["Tue"]), "2026-11-25T05:00", True, id="began the day before"),
        pytest.param(entry("22:00", "06:00", days=["Tue"]), "2026-11-25T23:00", False, id="begins on that day only"),
        (entry("08:00", "18:00", timeZone="America/New_York"), NOON, False),
        (entry("08:00", "18:00", timeZone="America/New_York"), "2026-11-25T14:00", True),
        (entry("08:00", "18:00", timeZone="Europe/Berlin"), "2026-07-01T06:30", True),
        (entry("08:00", "18:00", timeZone="Europe/Berlin"), "2026-12-01T06:30", False),
    ],
)
def test_an_entry_applies_on_its_days_and_hours_in_its_time_zone(
    one: ScheduledReplicas, when: str, applies: bool
) -> None:
    assert (scheduled([one], at(when)) is not None) == applies


def test_of_several_entries_the_one_with_most_replicas_applies() -> None:
    found = scheduled([entry("00:00", "23:00"), entry("08:00", "18:00", minReplicas=7)], at(NOON))

    assert found is not None
    assert found.min_replicas == 7


def test_an_unknown_time_zone_is_refused_with_what_is_expected() -> None:
    with pytest.raises(ValidationError, match="Europe/Atlantis is no time zone: give an IANA name"):
        entry("08:00", "18:00", timeZone="Europe/Atlantis")


def test_a_schedule_raises_the_least_and_is_named_as_the_reason() -> None:
    policy = policy_at(POLICY, [entry("08:00", "18:00", days=["Wed"])], None, spent(0), 1)

    assert (policy.min_replicas, policy.max_replicas) == (4, 20)
    assert policy.bound_reason(2, 4) == "schedule: at least 4 from Wed 08:00 to 18:00 UTC -> 4"
    assert policy_at(POLICY, [entry("13:00", "18:00")], None, spent(0), 1) == POLICY


@pytest.mark.parametrize(
    ("hours", "allowed"),
    [
        pytest.param(10, 20, id="far from it"),
        pytest.param(80, 9, id="eight hours are left beside twelve for one replica"),
        pytest.param(87.5, 1, id="less than an hour of another one is left"),
        pytest.param(120, 1, id="exceeded: minReplicas stay"),
    ],
)
def test_the_days_gpu_hours_lower_the_most_and_keep_the_least(hours: float, allowed: int) -> None:
    policy = policy_at(POLICY, [], 100, spent(hours), 1)

    assert (policy.min_replicas, policy.max_replicas) == (1, allowed)
    if allowed < 20:
        assert policy.bound_reason(20, allowed).startswith(f"cost: {hours:.1f} of 100 GPU-hours of the day (UTC) are")


def test_the_days_gpu_hours_go_before_the_schedule() -> None:
    policy = policy_at(POLICY, [entry("08:00", "18:00")], 100, spent(90), 1)

    assert (policy.min_replicas, policy.max_replicas) == (1, 1)


def test_gpu_hours_are_counted_by_replica_and_begin_anew_at_midnight() -> None:
    evening = GpuHours("2026-11-25", 50.0, at("2026-11-25T22:00"))

    assert evening.after(4, 2, at("2026-11-25T23:00")).hours == pytest.approx(58.0)
    next_day = evening.after(4, 2, at("2026-11-26T00:30"))
    assert (next_day.day, next_day.hours) == ("2026-11-26", pytest.approx(4.0))
    assert evening.after(4, 2, at("2026-11-25T21:00")).hours == 50.0  # the clock was set back


def test_gpus_of_a_replica_count_each() -> None:
    two = replace(POLICY, min_replicas=0)

    assert policy_at(two, [], 100, spent(90), 2).max_replicas == 5
