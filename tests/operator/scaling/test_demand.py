from __future__ import annotations

import pytest

from llmservice_operator.scaling.demand import Cost, Demand


def demand(requests: float) -> Demand:
    return Demand(requests, 1000 * requests, 100 * requests)


def test_a_demand_costs_replicas_by_its_tokens() -> None:
    cost = Cost(request_s=0.0, prompt_token_s=1e-4, output_token_s=1e-3)

    assert cost.replicas(demand(10)) == pytest.approx(2.0)
    assert Cost(0.5).replicas(demand(10)) == 5.0
