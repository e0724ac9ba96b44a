from __future__ import annotations

from dataclasses import replace

import pytest

from llmservice_operator.api.spec import Autoscaling, Slo
from llmservice_operator.api.status import CapacityStatus
from llmservice_operator.scaling.history import CAPACITY_KEEP_S
from llmservice_operator.scaling.scaling import ScalePolicy
from llmservice_operator.signals.load import Load, PodLoad
from llmservice_operator.signals.service_queries import ServiceQueries
from llmservice_operator.status.note_times import Noting
from llmservice_operator.status.signal_status import capacity_status, noted, noted_signals, signals_of

NOW = 1_700_000_000.0
STAMP = "2023-11-14T22:13:20Z"
POLICY = ScalePolicy.of(Autoscaling(max_replicas=4, queue_depth=2), Slo(ttft_p99="2s"), max_num_seqs=8)
QUERIES = ServiceQueries("team-a", "tiny", 60)
LOAD = Load("pods", (PodLoad("a", 8, 3, 0.5), PodLoad("b", 4, 0, 0.25)), arrivals_per_s=5.0, ttft_p99_s=0.123456)
DUE, NOT_DUE, FILLING = Noting(), Noting(due=False), Noting(whole=False)


def test_every_signal_stands_beside_its_threshold() -> None:
    signals = signals_of(LOAD, POLICY, drain_per_s=4.0, queries=QUERIES)

    assert [(one.name, one.value, one.target) for one in signals] == [
        ("queue", 1.5, 2),
        ("utilization", 0.75, 0.8),
        ("kvCache", 0.375, 0.8),
        ("arrivals", 2.5, 3.2),
        ("ttftP99", 0.123, 2),
    ]
    assert all(one.query and one.unit for one in signals)


def test_thresholds_are_there_before_any_load_is() -> None:
    signals = signals_of(None, POLICY, drain_per_s=None, queries=QUERIES)

    assert [one.target for one in signals] == [2, 0.8, 0.8, None, 2]
    assert {one.value for one in signals} == {None}


@pytest.mark.parametrize(
    ("before", "now", "noting", "expected"),
    [
        pytest.param(None, 1.0, DUE, 1.0, id="the first figure"),
        pytest.param(1.0, 1.09, DUE, 1.0, id="a small move is no news"),
        pytest.param(1.0, 1.2, DUE, 1.2, id="a large one is"),
        pytest.param(1.0, 1.2, NOT_DUE, 1.0, id="but not yet"),
        pytest.param(1.0, 0.0, DUE, 0.0, id="idle"),
        pytest.param(0.0, 0.0, DUE, 0.0, id="still idle"),
        pytest.param(1.0, None, DUE, None, id="nothing to tell"),
        pytest.param(1.0, None, NOT_DUE, 1.0, id="for a moment"),
        pytest.param(1.0, None, FILLING, 1.0, id="not known yet"),
        pytest.param(1.0, 2.0, FILLING, 2.0, id="known before the window is full"),
    ],
)
def test_a_figure_is_rewritten_only_where_it_is_news(
    before: float | None, now: float | None, noting: Noting, expected: float | None
) -> None:
    assert noted(before, now, noting) == expected


def test_a_changed_threshold_is_shown_at_once() -> None:
    before = signals_of(LOAD, POLICY, None, QUERIES)
    changed = signals_of(replace(LOAD, ttft_p99_s=9.0), replace(POLICY, ttft_p99_s=3.0), None, QUERIES)

    ttft = noted_signals(before, changed, NOT_DUE)[-1]

    assert (ttft.value, ttft.target) == (0.123, 3)


@pytest.mark.parametrize(
    ("drain", "expected"),
    [
        pytest.param(None, None, id="unknown"),
        pytest.param((NOW + 60, 2.1), (2.0, STAMP), id="much the same"),
        pytest.param((NOW + 60, 3.0), (3.0, "2023-11-14T22:14:20Z"), id="another"),
        pytest.param(
            (NOW + CAPACITY_KEEP_S / 2, 2.1), (2.1, "2023-11-14T22:43:20Z"), id="the same, before the note is too old"
        ),
    ],
)
def test_the_capacity_is_noted_sparingly(drain: tuple[float, float] | None, expected: tuple[float, str] | None) -> None:
    after = capacity_status(CapacityStatus(requests_per_second=2.0, measured_at=STAMP), drain)

    assert (after and (after.requests_per_second, after.measured_at)) == expected
