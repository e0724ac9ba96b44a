from __future__ import annotations

import pytest

from llmservice_bench.record import Goodput, Promises, RequestRecord


def record(ttft_s: float, itl_s: list[float], error: str | None = None) -> RequestRecord:
    e2e_s = ttft_s + sum(itl_s)
    return RequestRecord(0.0, 10, output_tokens=len(itl_s) + 1, ttft_s=ttft_s, itl_s=itl_s, e2e_s=e2e_s, error=error)


def test_promises_are_read_in_milliseconds_as_vllm_takes_them() -> None:
    promises = Promises.parse(["ttft:500", "itl:80", "e2e:2500.5"])
    assert promises == Promises(ttft_s=0.5, itl_s=0.08, e2e_s=2.5005)
    assert str(promises) == "ttft:500 itl:80 e2e:2500.5"


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        ([], "nothing is promised"),
        (["speed:5"], "'speed:5'"),
        (["ttft"], "'ttft': expected NAME:MILLISECONDS"),
        (["ttft:fast"], "'ttft:fast': expected NAME:MILLISECONDS"),
        (["ttft:0"], "above 0"),
        (["ttft:inf"], "above 0"),
        (["ttft:1", "ttft:2"], "'ttft:2': expected each once"),
    ],
)
def test_promise_that_cannot_be_read_is_refused(pairs: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Promises.parse(pairs)


@pytest.mark.parametrize(
    ("promises", "ttft_s", "itl_s", "kept"),
    [
        (Promises(ttft_s=0.5), 0.5, [9.0], True),
        (Promises(ttft_s=0.5), 0.51, [], False),
        (Promises(tpot_s=0.1), 9.0, [0.05, 0.15], True),
        (Promises(tpot_s=0.1), 0.0, [0.05, 0.16], False),
        (Promises(itl_s=0.1), 9.0, [0.1] * 100 + [5.0], True),
        (Promises(itl_s=0.1), 0.0, [0.01] * 50 + [0.2], False),
        (Promises(itl_s=0.1, tpot_s=0.1), 9.0, [], True),
        (Promises(e2e_s=1.0), 0.5, [0.5], True),
        (Promises(ttft_s=0.5, e2e_s=1.0), 0.5, [0.6], False),
    ],
)
def test_request_keeps_all_promises_or_none(promises: Promises, ttft_s: float, itl_s: list[float], kept: bool) -> None:
    assert promises.kept_by(record(ttft_s, itl_s)) is kept


def test_failed_request_kept_nothing_and_counts_among_all() -> None:
    records = [record(0.1, []), record(0.9, []), record(0.1, [], error="HTTP 503"), record(0.2, [])]
    goodput = Goodput.of(records, Promises(ttft_s=0.5), duration_s=4.0)
    assert (goodput.kept, goodput.share, goodput.requests_per_s) == (2, 0.5, 0.5)


def test_goodput_without_requests_is_zero() -> None:
    assert Goodput.of([], Promises(ttft_s=0.5), 0.0).share == 0.0
