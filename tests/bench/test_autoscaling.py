from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoscaling
from llmservice_planner.traffic.traces import TraceRequest


def test_the_second_half_is_measured_after_two_minutes_of_the_first() -> None:
    trace = [TraceRequest(10.0 * number, 10, 10) for number in range(61)]
    first, second, duration_s = autoscaling.halves(trace)
    assert [each.arrival_s for each in first] == [10.0 * number for number in range(30)]
    assert [each.arrival_s for each in second] == [10.0 * number for number in range(43)]
    assert duration_s == 420.0
    assert second[12].arrival_s == autoscaling.WARMUP_S


def test_a_shape_begins_after_a_warmup_at_its_first_rate() -> None:
    shape = autoscaling.after_warmup(lambda at: 0.2 + 0.8 * at, 720.0)
    assert [shape(seconds / 720) for seconds in (0, 60, 120, 420, 720)] == pytest.approx([0.2, 0.2, 0.2, 0.6, 1.0])


def row(**values: float | None) -> dict[str, Any]:
    figures = {"builtin_kept": 99.5, "builtin_gpu": 1.2, "builtin_turns": 1, "startup_s": 30.0, "load_replicas": 2.0}
    return {**figures, "kpa_kept": 99.0, "kpa_gpu": 1.1, **values}


@pytest.mark.parametrize(
    ("values", "is_met", "others"),
    [
        ({}, True, []),
        ({"builtin_kept": 98.9}, False, ["kpa"]),
        ({"builtin_gpu": 1.31}, False, []),
        ({"kpa_kept": 99.6}, True, ["kpa"]),
        ({"kpa_kept": 99.6, "kpa_gpu": 1.2}, True, ["kpa"]),
        ({"kpa_kept": 99.5}, True, ["kpa"]),
        ({"kpa_kept": 99.5, "kpa_gpu": 1.2}, True, []),
    ],
)
def test_the_goal_and_which_policies_are_better(values: dict[str, float], is_met: bool, others: list[str]) -> None:
    assert autoscaling.met(row(**values)) == is_met
    assert autoscaling.beaten_by(row(**values), ["builtin", "kpa"]) == others


def test_checks_count_the_traffics_that_meet_the_goal() -> None:
    rows = [row(), row(builtin_gpu=1.5), row(kpa_kept=99.9, builtin_turns=2), row(load_replicas=None, builtin_turns=3)]
    goal, better, turns = autoscaling.checks(rows, ["builtin", "kpa"])
    assert (goal.measured, goal.met) == (3, False)
    assert (better.measured, better.met) == (1, False)
    assert (turns.measured, turns.met) == (2, False)


def test_run_again_the_built_in_policy_is_compared_with_recorded_figures() -> None:
    case = autoscaling.Case("step", 2.0, 30.0, 0, [], 720.0, ["builtin", "kpa:target=8"])
    recorded = {
        "name": "autoscaling",
        "rows": [{"traffic": "step", "load_replicas": 2.0, "startup_s": 30.0, "seed": 0}],
    }
    (one,) = autoscaling.again(recorded, [case])
    assert (one.policies, one.recorded) == (["builtin"], recorded["rows"][0])
    with pytest.raises(SystemExit, match=r"no row for step at load 2\.0, start-up 600 s, seed 0: run once without"):
        autoscaling.again(recorded, [replace(case, startup_s=600.0)])


def test_without_usable_results_nothing_is_run_again(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not exist: run once without --again"):
        autoscaling.read_recorded(tmp_path / "autoscaling.json")
    (tmp_path / "autoscaling.json").write_text('{"rows": [{"traffic": "step"}]}')
    with pytest.raises(SystemExit, match="earlier version, without the replicas at the start"):
        autoscaling.read_recorded(tmp_path / "autoscaling.json")


@pytest.mark.slow
def test_a_case_measures_every_policy_against_the_clairvoyant_schedule() -> None:
    lengths = [TraceRequest(0.0, 500, 100)]
    of = autoscaling.service()
    rate = autoscaling.peak_rate(of, lengths)
    requests = [TraceRequest(2 * number / rate, 500, 100) for number in range(round(90 * rate))]
    case = autoscaling.Case("constant", 1.0, 30.0, 0, requests, 180.0, ["builtin", "hpa:target=8", "llmd"])
    found = autoscaling.run_case(case)
    assert found["clairvoyant_kept"] >= 99
    assert 60 / 3600 <= found["clairvoyant_gpu_hours"] <= 2 * 60 / 3600  # a cold replica admits fewer at first
    assert found["hpa_gpu"] >= 0.5
    assert all(found[f"{name}_kept"] > 80 for name in ("builtin", "hpa", "llmd"))
    again = replace(case, policies=["builtin"], recorded={**found, "builtin_gpu": 0.0, "builtin_turns": 9})
    assert autoscaling.run_case(again) == found
    assert autoscaling.show(found, ["builtin", "hpa", "llmd"]).endswith("met" if autoscaling.met(found) else "MISSED")


def test_mispredicted_traffic_has_the_load_of_the_true_speed() -> None:
    of = autoscaling.service()
    cases = {case.name: case for case in autoscaling.mispredicted_cases(of, ["builtin"])}
    right, slow = cases["long answers x1"], cases["long answers x1.7"]
    assert len(right.trace) > 1.3 * len(slow.trace)
    assert {each.output_tokens for each in slow.trace} == {2500}
    assert autoscaling.slowed(of.latency, 1.7).prefill_s(1000) == pytest.approx(1.7 * of.latency.prefill_s(1000))
