from __future__ import annotations

from llmservice_operator.api.status import AutoscalingStatus, CapacityStatus, DecisionStatus
from llmservice_operator.scaling.scaling import Decision
from llmservice_operator.status.decision_log import log_decision, resume

NOW = 1_700_000_000.0


def decision(replicas: int, wanted: int | None = None) -> Decision:
    return Decision(replicas, replicas if wanted is None else wanted, ("because",))


def logged(*decisions: tuple[float, Decision]) -> list[DecisionStatus]:
    log: list[DecisionStatus] = []
    for time_s, one in decisions:
        log = log_decision(log, one, time_s)
    return log


def kept(log: list[DecisionStatus], capacity: CapacityStatus | None = None) -> AutoscalingStatus:
    return AutoscalingStatus(desired_replicas=3, decisions=log, capacity=capacity)


def test_the_newest_decision_comes_first_and_five_are_kept() -> None:
    log = logged(*((NOW + n, decision(n)) for n in range(1, 8)))

    assert [entry.replicas for entry in log] == [7, 6, 5, 4, 3]


def test_a_decision_that_changes_nothing_is_no_news() -> None:
    log = logged((NOW, decision(2)), (NOW + 5, decision(2)), (NOW + 10, decision(2)))

    assert [entry.time for entry in log] == ["2023-11-14T22:13:20Z"]


def test_the_beginning_of_a_wait_for_fewer_replicas_is_news() -> None:
    log = logged((NOW, decision(3)), (NOW + 60, decision(3, wanted=1)), (NOW + 65, decision(3, wanted=2)))

    assert [(entry.replicas, entry.wanted) for entry in log] == [(3, 1), (3, 3)]


def test_a_restarted_scaler_knows_since_when_fewer_are_wanted() -> None:
    log = logged((NOW, decision(1)), (NOW + 30, decision(3)), (NOW + 60, decision(3, wanted=1)))

    history = resume(kept(log), replicas=3, now=NOW + 200)

    assert history.wishes == ((NOW + 60, 3),)
    assert history.last_up_s == NOW + 30
    assert history.changes == ((NOW + 30, 2),)


def test_a_restarted_scaler_without_a_trace_starts_the_wait_anew() -> None:
    assert resume(None, replicas=3, now=NOW).wishes == ((NOW, 3),)
    assert resume(kept(logged((NOW - 60, decision(4, wanted=1)))), replicas=3, now=NOW).wishes == ((NOW, 3),)


def test_a_restarted_scaler_knows_what_a_replica_could_do() -> None:
    capacity = CapacityStatus(requests_per_second=1.5, measured_at="2023-11-14T22:13:20Z")

    assert resume(kept([], capacity), replicas=3, now=NOW + 60).drain == (NOW, 1.5)


def test_what_the_status_dates_after_now_is_taken_for_now() -> None:
    """The clock was set back while no operator ran."""
    log = logged((NOW, decision(1)), (NOW + 30, decision(3)), (NOW + 60, decision(3, wanted=1)))

    history = resume(kept(log), replicas=3, now=NOW + 10)

    assert history.wishes == ((NOW + 10, 3),)
    assert history.changes == ((NOW + 10, 2),)
