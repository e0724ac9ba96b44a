from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_local.control.rollout import ReplicaSetState, Scaling, plan_rollout, resolve


def rs(name: str, wanted: int, available: int | None = None) -> ReplicaSetState:
    return ReplicaSetState(name, wanted, wanted, wanted if available is None else available)


@pytest.mark.parametrize(
    ("surge", "unavailable", "replicas", "expected"),
    [
        ("25%", "25%", 4, (1, 1)),
        ("25%", "25%", 3, (1, 0)),
        ("25%", "25%", 1, (1, 0)),
        (0, 0, 3, (0, 1)),
        (2, 0, 3, (2, 0)),
        ("0%", "10%", 3, (0, 1)),
    ],
)
def test_percentages_become_pods(
    surge: int | str, unavailable: int | str, replicas: int, expected: tuple[int, int]
) -> None:
    assert resolve(surge, unavailable, replicas) == expected


@pytest.mark.parametrize(
    ("why", "scaling", "states", "expected"),
    [
        ("first rollout", Scaling(3, 1, 0), [rs("new", 0)], {"new": 3}),
        ("scale down", Scaling(1, 1, 0), [rs("new", 3)], {"new": 1}),
        ("surge first, then wait", Scaling(2, 1, 0), [rs("old", 2), rs("new", 0)], {"old": 2, "new": 1}),
        ("new one not available yet", Scaling(2, 1, 0), [rs("old", 2), rs("new", 1, 0)], {"old": 2, "new": 1}),
        ("new one available: an old one may go", Scaling(2, 1, 0), [rs("old", 2), rs("new", 1)], {"old": 1, "new": 1}),
        ("room again", Scaling(2, 1, 0), [rs("old", 1), rs("new", 1)], {"old": 1, "new": 2}),
        ("without surge, one may be missing", Scaling(2, 0, 1), [rs("old", 2), rs("new", 0)], {"old": 1, "new": 0}),
        ("broken old pods go first", Scaling(2, 1, 0), [rs("old", 2, 0), rs("new", 1)], {"old": 1, "new": 1}),
        ("recreate stops the old", Scaling(2, 0, 0, recreate=True), [rs("old", 2), rs("new", 0)], {"old": 0, "new": 0}),
        (
            "recreate then starts the new",
            Scaling(2, 0, 0, recreate=True),
            [rs("old", 0), rs("new", 0)],
            {"old": 0, "new": 2},
        ),
        (
            "paused rollouts stand still",
            Scaling(2, 1, 0, paused=True),
            [rs("old", 1), rs("new", 1)],
            {"old": 1, "new": 1},
        ),
        (
            "paused ones can be scaled",
            Scaling(5, 1, 0, paused=True),
            [rs("old", 2), rs("new", 0)],
            {"old": 5, "new": 0},
        ),
    ],
)
def test_next_step_of_a_rollout(
    why: str, scaling: Scaling, states: list[ReplicaSetState], expected: dict[str, int]
) -> None:
    assert plan_rollout(scaling, "new", states) == expected, why


@given(
    replicas=st.integers(0, 8),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
    before=st.integers(0, 8),
    ready=st.lists(st.booleans(), min_size=200, max_size=200),
)
def test_rollout_ends_and_keeps_within_surge_and_unavailability(
    replicas: int, surge: int, unavailable: int, before: int, ready: list[bool]
) -> None:
    surge, unavailable = resolve(surge, unavailable, replicas)
    scaling = Scaling(replicas, surge, unavailable)
    old, new, new_available = before, 0, 0
    for moment in ready:
        plan = plan_rollout(scaling, "new", [rs("old", old), rs("new", new, new_available)])
        assert plan["old"] <= old
        if new < plan["new"]:
            assert plan["new"] + old <= max(replicas + surge, old)
        lost = old - plan["old"]
        if lost:
            assert plan["old"] + min(new_available, plan["new"]) >= min(replicas - unavailable, old + new_available)
        old, new = plan["old"], plan["new"]
        new_available = min(new, new_available + moment)
    if sum(ready) > 2 * (replicas + before):
        assert (old, new) == (0, replicas)
