"""Figures of a run, checked against hand-made records."""

from __future__ import annotations

import json

import pytest

from llmservice_bench.record import RequestRecord
from llmservice_bench.report import Report, latency_cells


def record(started_s: float, ttft_s: float, itl_s: list[float], **fields: object) -> RequestRecord:
    return RequestRecord(
        started_s=started_s,
        prompt_tokens=10,
        output_tokens=len(itl_s) + 1,
        ttft_s=ttft_s,
        itl_s=itl_s,
        e2e_s=ttft_s + sum(itl_s),
        **fields,  # type: ignore[arg-type]
    )


def test_throughput_counts_from_the_first_start_to_the_last_end() -> None:
    report = Report.of([record(1.0, 0.5, [0.25, 0.25]), record(2.0, 1.0, [1.0])])
    assert report.duration_s == pytest.approx(3.0)
    assert report.output_tokens == 5
    assert report.output_tokens_per_s == pytest.approx(5 / 3)
    assert report.total_tokens_per_s == pytest.approx(25 / 3)
    assert report.requests_per_s == pytest.approx(2 / 3)


def test_itl_is_pooled_over_tokens_and_tpot_is_one_value_a_request() -> None:
    report = Report.of([record(0.0, 0.5, [0.1, 0.1, 0.1]), record(0.0, 0.5, [0.5])])
    assert report.itl_s.count == 4
    assert report.itl_s.mean == pytest.approx(0.2)
    assert report.tpot_s.count == 2
    assert report.tpot_s.mean == pytest.approx(0.3)


def test_answer_of_one_token_has_no_tpot() -> None:
    assert Report.of([record(0.0, 0.5, [])]).tpot_s.count == 0


def test_failures_are_counted_separately_and_in_no_percentile() -> None:
    failed = RequestRecord(started_s=0.0, prompt_tokens=10, e2e_s=99.0, error="HTTP 503")
    report = Report.of([record(0.0, 0.5, [0.1]), failed, failed])
    assert (report.completed, report.failed, report.failures) == (1, 2, {"HTTP 503": 2})
    assert report.e2e_s.p99 == pytest.approx(0.6)
    assert report.prompt_tokens == 10
    assert "2 × HTTP 503" in "\n".join(report.lines())


def test_percentiles_are_those_of_the_values() -> None:
    report = Report.of([record(0.0, ttft / 100, []) for ttft in range(101)])
    assert (report.ttft_s.p50, report.ttft_s.p99) == (pytest.approx(0.5), pytest.approx(0.99))


def test_report_without_requests_is_all_zeros() -> None:
    report = Report.of([])
    assert (report.completed, report.failed, report.output_tokens_per_s) == (0, 0, 0.0)
    assert [line.split() for line in report.lines()[-4:]] == [
        [name, "-", "-", "-"] for name in ("TTFT", "TPOT", "ITL", "E2E")
    ]
    assert latency_cells(report.row()).split() == ["-", "-", "-"]


def test_json_has_throughput_beside_latency_and_names_the_machine() -> None:
    result = json.loads(json.dumps(Report.of([record(0.0, 0.5, [0.1])]).as_dict()))
    assert result["output_tokens_per_s"] > 0
    assert result["ttft_s"]["p99"] == pytest.approx(0.5)
    assert result["machine"]["cpus"] >= 1


def test_row_is_flat_and_has_latencies_in_milliseconds_beside_throughput() -> None:
    row = Report.of([record(0.0, 0.5, [0.1, 0.3])]).row()
    assert row["output_tokens_per_s"] == pytest.approx(3 / 0.9)
    assert (row["ttft_p99_ms"], row["itl_p50_ms"], row["e2e_p50_ms"]) == pytest.approx((500.0, 200.0, 900.0))
    assert (row["completed"], row["failed"]) == (1, 0)
