"""Lengths come from a trace, as it is or scaled."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from llmservice_bench.trace import SAMPLE, Lengths, arrival_times, read_arrivals, read_trace, scaled_to
from llmservice_planner.traffic.traces import TraceError


def test_bundled_sample_has_the_shape_of_the_whole_trace() -> None:
    lengths = read_trace()
    assert len(lengths) == 1000
    # The whole trace: p50/p95/p99 of 1020/4083/4142 prompt and 129/451/601 generated tokens.
    prompt = np.percentile([each.prompt_tokens for each in lengths], (50, 95, 99))
    output = np.percentile([each.output_tokens for each in lengths], (50, 95, 99))
    assert prompt == pytest.approx([1020, 4083, 4142], rel=0.05)
    assert output == pytest.approx([129, 451, 601], rel=0.05)


def test_scaling_keeps_at_least_one_token_on_either_side() -> None:
    assert Lengths(1000, 100).scaled(0.05) == Lengths(50, 5)
    assert Lengths(3, 2).scaled(0.01) == Lengths(1, 1)


def test_trace_scaled_to_a_model_fits_it_and_keeps_its_tail() -> None:
    lengths = read_trace()
    scaled = scaled_to(lengths, Lengths(200, 256))
    assert max(each.prompt_tokens for each in scaled) == 200
    assert max(each.output_tokens for each in scaled) == 256
    assert min(min(each.prompt_tokens, each.output_tokens) for each in scaled) >= 1
    whole, small = (np.percentile([each.output_tokens for each in some], (50, 99)) for some in (lengths, scaled))
    assert small[1] / small[0] == pytest.approx(whole[1] / whole[0], rel=0.05)


def test_unusable_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "absent.csv")


def gaps(rate: float, burstiness: float, count: int = 20_000) -> np.ndarray:
    times = list(islice(arrival_times(rate, burstiness, np.random.default_rng(7)), count))
    return np.diff(times)


@pytest.mark.parametrize(("rate", "burstiness"), [(1.0, 1.0), (50.0, 1.0), (10.0, 0.25), (10.0, 4.0)])
def test_mean_gap_is_one_over_the_rate_and_its_spread_follows_the_burstiness(rate: float, burstiness: float) -> None:
    found = gaps(rate, burstiness)
    assert found.mean() == pytest.approx(1 / rate, rel=0.05)
    # The coefficient of variation of a gamma distribution is 1/sqrt(shape).
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_rate_sends_everything_at_once() -> None:
    assert list(islice(arrival_times(float("inf"), 1.0, np.random.default_rng(0)), 3)) == [0.0, 0.0, 0.0]


def test_same_seed_gives_the_same_arrivals() -> None:
    assert (gaps(3.0, 1.0, 50) == gaps(3.0, 1.0, 50)).all()


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_rate_and_burstiness_must_be_positive(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        next(arrival_times(rate, burstiness, np.random.default_rng(0)))


def test_traces_own_times_count_from_its_first_request_and_stretch() -> None:
    times = read_arrivals(SAMPLE)
    assert times[:2] == pytest.approx([0.0, 11.1962], abs=1e-3)
    assert len(times) == 1000
    assert read_arrivals(SAMPLE, 0.1) == pytest.approx([time / 10 for time in times])
