"""Replicas per GPU for traffic: enough of them, the cheapest first, and no promise without a reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from llmservice_planner.capacity.plan import NOT_SERVABLE, Candidate, Targets, Traffic, candidates
from llmservice_planner.capacity.replica import UTILISATION
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.gpu import GPUS, find_gpu
from llmservice_planner.sizing.request import SizingRequest
from llmservice_planner.traffic.lengths import Lengths, pairs

LLAMA3_8B = ModelShape(
    layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=8192,
)
LLAMA3_70B = replace(LLAMA3_8B, layers=80, hidden_size=8192, intermediate_size=28672, heads=64)
CHAT = Traffic(20.0, pairs(Lengths(512, 4096), Lengths(150, 800)))
PROMISE = Targets(ttft_p99_s=1.0, itl_p99_s=0.05)


def base(shape: ModelShape = LLAMA3_8B, **fields: object) -> SizingRequest:
    given = {"max_model_len": 4096, "expected_tokens": 1000, **fields}
    return SizingRequest(shape=shape, device=find_gpu("l4"), itl_p99_s=PROMISE.itl_p99_s, **given)  # type: ignore[arg-type]


def planned(*gpus: str, traffic: Traffic = CHAT, targets: Targets = PROMISE, **fields: object) -> list[Candidate]:
    return candidates(base(**fields), [find_gpu(name) for name in gpus], traffic, targets)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["l40s", "a100-80gb", "h100-80gb", "a10"])
def test_replicas_keep_the_promise_at_80_percent(name: str) -> None:
    (found,) = planned(name)
    assert found.capacity is not None
    assert found.point is not None
    used = CHAT.requests_per_s / (found.replicas * found.capacity.requests_per_s)
    fewer = CHAT.requests_per_s / ((found.replicas - 1) * found.capacity.requests_per_s) if found.replicas > 1 else 9.0
    assert used <= UTILISATION < fewer
    assert found.point.ttft_p99_s <= 1.0
    assert found.point.itl_p99_s <= 0.05
    assert found.servable


@pytest.mark.parametrize("requests_per_s", [1e6, 1e300, 1.7e308])
def test_more_replicas_than_a_service_may_have_are_a_problem(requests_per_s: float) -> None:
    (found,) = planned("l4", traffic=replace(CHAT, requests_per_s=requests_per_s))
    assert (found.replicas, found.servable) == (0, False)
    assert "a service has at most 1000" in found.problem


def test_replicas_with_room_for_few_requests_are_so_many_that_waits_end() -> None:
    traffic = Traffic(1.0, [(12_000, 200)] * 10)
    shape = replace(LLAMA3_8B, max_position_embeddings=16_384)
    given = {"shape": shape, "max_model_len": 16_384, "expected_tokens": 12_200}
    (found,) = candidates(replace(base(**given), itl_p99_s=None), [find_gpu("l4")], traffic, Targets())
    assert found.capacity is not None
    assert found.point is not None
    assert found.replicas > math.ceil(1.0 / (UTILISATION * found.capacity.requests_per_s))
    assert found.point.ttft_p99_s < math.inf


def test_cheapest_is_first_and_unpriced_gpus_follow() -> None:
    gpus = [find_gpu(name) for name in ("h200", "h100", "l40s", "a100-80gb")]
    prices = {"h100-80gb": 2.0, "l40s": 3.0}
    found = candidates(base(), gpus, CHAT, PROMISE, prices)
    assert [each.gpu.name for each in found[:2]] == ["h100-80gb", "l40s"]
    assert found[0].cost_per_hour == found[0].replicas * 2.0
    assert found[0].cost_per_million_tokens(CHAT) == pytest.approx(
        found[0].replicas * 2.0 / (CHAT.tokens_per_s * 3600 / 1e6)
    )
    assert found[2].cost_per_hour is None


def test_model_that_needs_several_gpus_is_not_servable() -> None:
    (found,) = planned("h100-80gb", shape=LLAMA3_70B)
    assert found.gpu_count > 1
    assert found.replicas > 0
    assert found.problem == NOT_SERVABLE
    assert not found.servable


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (Targets(itl_p99_s=0.0005), "ms for one sequence, past the ITL target"),
        (Targets(ttft_p99_s=0.001), "past the TTFT target"),
    ],
)
def test_promise_that_no_gpu_keeps_has_a_reason(targets: Targets, problem: str) -> None:
    (found,) = planned("l4", targets=targets)
    assert found.replicas == 0
    assert problem in found.problem
    assert "nor do more GPUs help" in found.problem
    (of_one,) = candidates(base(), [find_gpu("l4")], CHAT, targets, latency=Budget.of(base()).latency)
    assert of_one.problem.endswith(problem)  # a measured latency is of one GPU, and no more were tried
    assert found.problem.startswith(f"{of_one.problem},"), "the figure is that of the fewest GPUs"


def test_shorter_steps_are_chosen_where_a_full_chunk_misses_the_itl_target() -> None:
    (found,) = planned("l40s")
    assert found.request.max_num_batched_tokens is not None
    assert found.request.max_num_batched_tokens < 1024
    (given,) = planned("l40s", max_num_batched_tokens=1024)
    assert given.request.max_num_batched_tokens == 1024
    assert given.replicas > found.replicas


def test_more_traffic_and_fewer_cache_hits_need_more_replicas() -> None:
    def replicas(traffic: Traffic) -> int:
        return planned("l40s", traffic=traffic)[0].replicas

    assert replicas(replace(CHAT, requests_per_s=100.0)) > replicas(CHAT)
    assert replicas(replace(CHAT, requests_per_s=100.0, prefix_hit_rate=0.8)) < replicas(
        replace(CHAT, requests_per_s=100.0)
    )


def test_gpus_without_bfloat16_are_planned_in_float16() -> None:
    (found,) = planned("v100-32gb")
    assert found.request.dtype == "float16"


def test_lengths_are_those_of_the_traffic() -> None:
    traffic = Traffic(1.0, [(900.0, 100.0)] * 98 + [(2800.0, 200.0)] * 2)
    assert traffic.expected_tokens == 1040
    assert traffic.max_model_len == 3328  # 3000 x 1.1 = 3300
    assert traffic.tokens_per_s == pytest.approx(1040)


def test_every_gpu_of_the_catalogue_has_a_row() -> None:
    found = candidates(base(), list(GPUS.values()), CHAT, Targets())
    assert {each.gpu.name for each in found} == set(GPUS)
    json.dumps([each.to_dict(CHAT) for each in found], allow_nan=False)
