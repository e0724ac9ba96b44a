from __future__ import annotations

from itertools import pairwise

import pytest

from llmservice_operator.scaling.demand import SAMPLE_S, Cost, Demand, remembered


def demand(requests: float) -> Demand:
    return Demand(requests, 1000 * requests, 100 * requests)


def test_a_demand_costs_replicas_by_its_tokens() -> None:
    cost = Cost(request_s=0.0, prompt_token_s=1e-4, output_token_s=1e-3)

    assert cost.replicas(demand(10)) == pytest.approx(2.0)
    assert Cost(0.5).replicas(demand(10)) == 5.0


def test_samples_are_kept_for_ten_minutes_at_most_one_for_each_quarter_of_a_minute() -> None:
    samples: tuple[tuple[float, Demand], ...] = ()
    for tick in range(400):
        samples = remembered(samples, demand(tick), tick * 5.0)

    times = [when for when, _ in samples]
    assert 570 <= times[-1] - times[0] <= 600
    assert {later - earlier for earlier, later in pairwise(times)} == {SAMPLE_S}
