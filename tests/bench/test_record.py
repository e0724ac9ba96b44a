from __future__ import annotations

import pytest

from llmservice_bench.record import Goodput, LatencyTargets, RequestRecord


def record(ttft_s: float, itl_s: list[float], error: str | None = None) -> RequestRecord:
    e2e_s = ttft_s + sum(itl_s)
    return RequestRecord(0.0, 10, output_tokens=len(itl_s) + 1, ttft_s=ttft_s, itl_s=itl_s, e2e_s=e2e_s, error=error)


def test_targets_are_read_in_milliseconds_as_vllm_takes_them() -> None:
    targets = LatencyTargets.parse(["ttft:500", "itl:80", "e2e:2500.5"])
    assert targets == LatencyTargets(ttft_s=0.5, itl_s=0.08, e2e_s=2.5005)
    assert str(targets) == "ttft:500 itl:80 e2e:2500.5"


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        ([], "no target is given"),
        (["speed:5"], "'speed:5'"),
        (["ttft"], "'ttft': expected NAME:MILLISECONDS"),
        (["ttft:fast"], "'ttft:fast': expected NAME:MILLISECONDS"),
        (["ttft:0"], "above 0"),
        (["ttft:inf"], "above 0"),
        (["ttft:1", "ttft:2"], "'ttft:2': expected each once"),
    ],
)
def test_target_that_cannot_be_read_is_refused(pairs: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LatencyTargets.parse(pairs)


@pytest.mark.parametrize(
    ("targets", "ttft_s", "itl_s", "kept"),
    [
        (LatencyTargets(ttft_s=0.5), 0.5, [9.0], True),
        (LatencyTargets(ttft_s=0.5), 0.51, [], False),
        (LatencyTargets(tpot_s=0.1), 9.0, [0.05, 0.15], True),
        (LatencyTargets(tpot_s=0.1), 0.0, [0.05, 0.16], False),
        (LatencyTargets(itl_s=0.1), 9.0, [0.1] * 100 + [5.0], True),
        (LatencyTargets(itl_s=0.1), 0.0, [0.01] * 50 + [0.2], False),
        (LatencyTargets(itl_s=0.1, tpot_s=0.1), 9.0, [], True),
        (LatencyTargets(e2e_s=1.0), 0.5, [0.5], True),
        (LatencyTargets(ttft_s=0.5, e2e_s=1.0), 0.5, [0.6], False),
    ],
)
def test_request_meets_all_targets_or_none(
    targets: LatencyTargets, ttft_s: float, itl_s: list[float], kept: bool
) -> None:
    assert targets.met_by(record(ttft_s, itl_s)) is kept


def test_failed_request_kept_nothing_and_counts_among_all() -> None:
    records = [record(0.1, []), record(0.9, []), record(0.1, [], error="HTTP 503"), record(0.2, [])]
    goodput = Goodput.of(records, LatencyTargets(ttft_s=0.5), duration_s=4.0)
    assert (goodput.kept, goodput.share, goodput.requests_per_s) == (2, 0.5, 0.5)


def test_goodput_without_requests_is_zero() -> None:
    assert Goodput.of([], LatencyTargets(ttft_s=0.5), 0.0).share == 0.0
