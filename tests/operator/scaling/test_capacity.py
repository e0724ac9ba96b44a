from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_operator.api.resource import LLMService
from llmservice_operator.scaling.capacity import MOST_UTILIZATION, ReplicaModel, Staffing, work_of
from llmservice_operator.scaling.demand import NO_DEMAND, Demand
from llmservice_operator.sizing import Sized
from llmservice_planner.capacity.replica import Work, replica_capacity

REQUEST = Demand(1, 1000, 200)
LONG = Work(20_000, 1000, 20_500)
FULL_OF_20 = Staffing(alone=0.5, slots=20, hold_s=15, patience_s=1.5)
"""An L4 with an 8B model: twenty requests at once, each for fifteen seconds."""


def test_a_request_costs_what_a_replica_serves_of_its_kind(replica: ReplicaModel) -> None:
    cost = replica.cost(REQUEST)
    alone = replica_capacity(
        replica.latency, replica.limits(work_of(REQUEST)), replace(work_of(REQUEST), prompt_tokens=1000)
    )

    assert cost is not None
    assert cost.replicas(REQUEST.scaled(alone.requests_per_s)) == pytest.approx(1.0, rel=0.05)


def test_longer_answers_cost_more_and_cached_prompts_less(replica: ReplicaModel) -> None:
    cost = replica.cost(REQUEST)

    assert cost is not None
    assert cost.replicas(Demand(1, 1000, 400)) > 1.5 * cost.replicas(REQUEST)
    assert cost.replicas(Demand(1, 100, 200, cached_tokens=900)) < cost.replicas(REQUEST)


def test_the_measured_blocks_bound_what_runs_at_once(
    gpu_sized: Sized, gpu_service: Callable[..., LLMService], replica: ReplicaModel
) -> None:
    assert gpu_sized.plan is not None
    half = ReplicaModel.of(gpu_sized, gpu_service().spec.slo, kv_blocks=(gpu_sized.plan.num_blocks - 1) // 2)

    assert half is not None
    assert half.limits(LONG).kv_tokens == pytest.approx(replica.limits(LONG).kv_tokens / 2, rel=0.01)


def test_windows_leave_room_for_more_requests_as_the_planner_counts_them(
    gpu_sized: Sized, gpu_service: Callable[..., LLMService]
) -> None:
    assert gpu_sized.model.shape is not None
    assert gpu_sized.plan is not None
    shape = replace(gpu_sized.model.shape, sliding_window=1024, sliding_layers=gpu_sized.model.shape.layers - 8)
    sized = replace(gpu_sized, model=replace(gpu_sized.model, shape=shape))
    model, groups = ReplicaModel.of(sized, gpu_service().spec.slo), sized.block_groups

    assert model is not None
    assert groups is not None
    fit = (gpu_sized.plan.num_blocks - 1) / groups.blocks(20_500)
    assert model.limits(LONG).kv_tokens == pytest.approx(fit * 20_500)


def test_no_load_is_too_large_for_the_arithmetic() -> None:
    assert Staffing(alone=0.5, slots=400, hold_s=15, patience_s=0.1).replicas(1500.0) == pytest.approx(1667, rel=0.01)


def test_a_device_of_unknown_rates_has_no_model(sized: Sized, service_of: Callable[..., LLMService]) -> None:
    assert ReplicaModel.of(sized, service_of().spec.slo) is None


def test_without_requests_nothing_is_predicted(replica: ReplicaModel) -> None:
    assert (replica.cost(NO_DEMAND), replica.staffing(NO_DEMAND), work_of(NO_DEMAND)) == (None, None, None)


def test_an_itl_target_that_nothing_keeps_leaves_the_full_capacity(replica: ReplicaModel) -> None:
    unreachable = replace(replica, itl_p99_s=0.001)
    work = work_of(REQUEST)

    assert work is not None
    assert unreachable.capacity(work) == replica.full(work)


def test_more_replicas_may_be_used_further(replica: ReplicaModel) -> None:
    used = [FULL_OF_20.utilization(number) for number in (1, 2, 5, 10, 40)]

    assert used == sorted(used)
    assert used[0] < 0.75
    assert used[3] > 0.85
    assert used[-1] <= MOST_UTILIZATION


def test_without_a_target_replicas_are_used_to_80_percent(replica: ReplicaModel) -> None:
    staffing = replace(replica, ttft_p99_s=None).staffing(REQUEST)

    assert staffing is not None
    assert staffing.replicas(4.0) == pytest.approx(5.0)


def test_a_tight_target_leaves_more_room(replica: ReplicaModel) -> None:
    tight, loose = (replace(replica, ttft_p99_s=target).staffing(REQUEST) for target in (1.0, 20.0))

    assert tight is not None
    assert loose is not None
    assert tight.replicas(2.0) > loose.replicas(2.0)


@given(busy=st.floats(0, 200), more=st.floats(0, 50))
def test_more_load_needs_no_fewer_replicas_and_never_full_ones(busy: float, more: float) -> None:
    assert FULL_OF_20.replicas(busy + more) >= FULL_OF_20.replicas(busy) - 1e-6
    assert FULL_OF_20.replicas(busy) >= busy / MOST_UTILIZATION - 1e-6
    number = max(1, math.ceil(FULL_OF_20.replicas(busy) - 1e-6))
    assert busy / number <= FULL_OF_20.utilization(number) + 1e-6


@pytest.mark.parametrize("demand", [Demand(1, 1000, 200), Demand(1, 170, 1)])
def test_a_replica_is_busy_with_what_it_runs_up_to_all_of_its_time(replica: ReplicaModel, demand: Demand) -> None:
    """Of answers of one token, which their prompts' last steps make, a full replica decodes hardly any."""
    full = replica.capacity(work_of(demand) or Work(1, 1, 1)).num_seqs

    assert replica.busy(demand, 0) == 0
    assert replica.busy(demand, full + 10) == pytest.approx(1)
    assert replica.busy(demand, full / 2) >= 0.5 * replica.busy(demand, full)  # smaller batches take shorter steps
