"""Plans for known models on known GPUs, for each bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.gpu import CPU, GIB, GPU, find_gpu
from llmservice_planner.sizing.overhead import logits_row_bytes
from llmservice_planner.sizing.plan import Plan, SizingError, SizingRequest, max_num_seqs_with, plan

ShapeOf = Callable[[str], ModelShape]
H100 = find_gpu("h100-80gb")
SEEN_79_2 = replace(H100, memory_bytes=int(79.2 * GIB))
L4 = find_gpu("l4")


def _tokens(answer: Plan) -> int:
    return (answer.num_blocks - 1) * answer.block_size


def _measured(shape: ModelShape, device_count: int, overhead_gib: float) -> SizingRequest:
    return SizingRequest(
        shape=shape,
        device=SEEN_79_2,
        device_count=device_count,
        max_model_len=8192,
        gpu_memory_utilization=0.92,
        overhead_bytes_per_device=int(overhead_gib * GIB),
    )


def test_llama_3_8b_on_an_80_gb_gpu_holds_458k_tokens(shape_of: ShapeOf) -> None:
    assert _tokens(plan(_measured(shape_of("llama-3-8b"), 1, 2.0))) == pytest.approx(458_000, rel=0.001)


@pytest.mark.parametrize(("overhead_gib", "tokens"), [(2.0, 498_000), (2.5, 492_000)])
def test_llama_3_70b_on_four_of_them_holds_492k_tokens_once_nccl_has_its_half_gib(
    shape_of: ShapeOf, overhead_gib: float, tokens: int
) -> None:
    assert _tokens(plan(_measured(shape_of("llama-3-70b"), 4, overhead_gib))) == pytest.approx(tokens, rel=0.001)


def test_a_70b_over_four_gpus_costs_320_kib_a_token(shape_of: ShapeOf) -> None:
    answer = plan(SizingRequest(shape=shape_of("llama-3-70b"), device=H100, device_count=4, max_model_len=8192))
    assert answer.kv_bytes_per_token == 327_680
    assert answer.weights_bytes == 2 * 70_553_706_496
    assert (answer.fits, answer.limited_by) == (True, "ridge")


def test_measured_blocks_change_the_largest_batch_only_where_memory_bounds_it(shape_of: ShapeOf) -> None:
    request = SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=8192)
    answer = plan(request)
    assert answer.limited_by == "ridge"
    planned = answer.max_num_seqs
    assert max_num_seqs_with(request, answer.num_blocks - 1, planned) == (planned, "ridge")
    assert max_num_seqs_with(request, answer.num_blocks * 9 // 10, planned) == (planned, "ridge")
    fewer, limited_by = max_num_seqs_with(request, 1000, planned)
    assert 0 < fewer < planned
    assert limited_by == "logits"
    assert max_num_seqs_with(request, 10, planned)[0] == 0  # not one request of max_model_len


@given(st.integers(600, 3000))
def test_a_server_with_the_number_from_measured_blocks_measures_blocks_that_give_it_again(num_blocks: int) -> None:
    shape = ModelShape(
        layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position_embeddings=8192,
    )
    request = SizingRequest(shape=shape, device=H100, max_model_len=8192)
    planned = plan(request)
    first, _ = max_num_seqs_with(request, num_blocks, planned.max_num_seqs)
    block_bytes = 16 * planned.kv_bytes_per_token
    row_bytes = logits_row_bytes(shape)
    # The memory is the same; rows of logits that are not needed any more are room for blocks.
    pool_bytes = (num_blocks + 1) * block_bytes + (planned.max_num_seqs - first) * row_bytes
    again, _ = max_num_seqs_with(request, pool_bytes // block_bytes - 1, first)
    assert abs(again - first) <= 1


def test_every_byte_of_the_usable_memory_is_accounted_for(shape_of: ShapeOf) -> None:
    answer = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=8192))
    assert answer.weights_bytes + answer.overhead_bytes + answer.kv_pool_bytes == int(H100.memory_bytes * 0.9)
    assert answer.overhead_bytes == sum(term.total_bytes for term in answer.overhead)


def test_guaranteed_sequences_all_reach_the_full_length_and_one_more_would_not(shape_of: ShapeOf) -> None:
    answer = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=8192))
    usable, blocks_each = answer.num_blocks - 1, 8192 // 16
    assert answer.guaranteed_sequences * blocks_each <= usable < (answer.guaranteed_sequences + 1) * blocks_each


def test_three_numbers_of_sequences_are_those_of_long_typical_and_as_many_as_are_worth_it(shape_of: ShapeOf) -> None:
    answer = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=8192, expected_tokens=1530))
    usable = answer.num_blocks - 1
    assert (answer.guaranteed_sequences, answer.expected_sequences) == (usable // 512, usable // 96)
    assert (answer.max_num_seqs, answer.limited_by) == (305, "ridge")


def test_pool_bounds_the_batch_by_128_tokens_a_sequence(shape_of: ShapeOf) -> None:
    """On an L4 with little memory left the pool holds fewer than the ridge."""
    request = SizingRequest(
        shape=shape_of("llama-3-8b"), device=L4, max_model_len=2048, gpu_memory_utilization=0.82, expected_tokens=160
    )
    answer = plan(request)
    assert answer.limited_by == "kvMemory"
    assert answer.max_num_seqs * 128 // 16 < answer.num_blocks <= (answer.max_num_seqs + 1) * (128 // 16 + 1)


@pytest.mark.parametrize(
    ("model", "gpu", "least_typical"), [("qwen2.5-7b", "l4", 47), ("gpt-oss-120b", "h100-80gb", 71)]
)
def test_rows_of_logits_leave_the_memory_to_blocks(shape_of: ShapeOf, model: str, gpu: str, least_typical: int) -> None:
    """With a row for each sequence of 128 tokens, which seldom run at once, 38 and 57 typical ones would fit."""
    answer = plan(SizingRequest(shape=shape_of(model), device=find_gpu(gpu), max_model_len=8192))
    rows_bytes = sum(term.total_bytes for term in answer.overhead if "logits" in term.name)
    assert answer.limited_by == "logits"
    assert answer.max_num_seqs >= 2 * answer.expected_sequences
    assert rows_bytes <= (rows_bytes + answer.kv_pool_bytes) / 16
    assert answer.expected_sequences >= least_typical


def test_one_block_holds_no_token(shape_of: ShapeOf) -> None:
    request = SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=160, overhead_bytes_per_device=0)
    ten_blocks = request.shape.num_parameters * 2 + 10 * 16 * 131_072
    exactly = replace(request, device=replace(H100, memory_bytes=ten_blocks), gpu_memory_utilization=1.0)
    assert plan(exactly).num_blocks == 10
    assert not plan(exactly).fits
    assert plan(replace(exactly, max_model_len=144)).max_num_seqs == 1


def test_a_plan_holds_one_sequence_of_full_length_however_short_requests_are(shape_of: ShapeOf) -> None:
    request = SizingRequest(shape=shape_of("qwen2.5-7b"), device=L4, max_model_len=32768, expected_tokens=64)
    assert plan(request).guaranteed_sequences >= 1
    tight = replace(request, gpu_memory_utilization=0.75)
    assert plan(request).fits
    assert not plan(tight).fits


@pytest.mark.parametrize(
    ("change", "limited_by", "max_num_seqs"),
    [
        ({"max_num_seqs": 7}, "maxNumSeqs", 7),
        ({"max_num_batched_tokens": 48}, "tokenBudget", 48),
        ({}, "ridge", 305),
        # ((7 - 0.6) ms x 2.61 TB/s - 15.01 GB) / (33.55 MB + 3.7 MB, the time of the head's arithmetic)
        ({"itl_p99_s": 0.007}, "itlTarget", 45),
    ],
)
def test_the_smallest_bound_is_named(
    shape_of: ShapeOf, change: dict[str, float], limited_by: str, max_num_seqs: int
) -> None:
    request = SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=256)
    answer = plan(replace(request, **change))
    assert (answer.limited_by, answer.max_num_seqs) == (limited_by, max_num_seqs)


def test_unknown_rates_leave_the_cap_as_the_bound(shape_of: ShapeOf) -> None:
    device = GPU("mystery", 80 * GIB)
    answer = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=device, max_model_len=256, itl_p99_s=0.01))
    assert (answer.limited_by, answer.max_num_seqs) == ("cap", 256)
    assert (answer.decode_step_s, answer.ridge_tokens, answer.itl_feasible) == (None, None, None)


def test_a_cpu_gets_no_larger_batch_than_it_is_faster_with(shape_of: ShapeOf) -> None:
    answer = plan(SizingRequest(shape=shape_of("qwen3-0.6b"), device=CPU(64 * GIB), max_model_len=1024))
    assert (answer.limited_by, answer.max_num_seqs) == ("cap", 64)


@pytest.mark.parametrize(("gpu", "warns"), [("a100-80gb", True), ("l4", False)])
def test_the_working_warns_of_an_fp8_cache_where_the_gpu_has_no_fp8(gpu: str, warns: bool, shape_of: ShapeOf) -> None:
    answer = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=find_gpu(gpu), max_model_len=2048, kv_dtype="fp8"))
    assert (f"caution: {gpu} has no fp8 units" in "\n".join(answer.explanation)) == warns


def test_the_users_number_is_taken_even_past_what_fits_and_the_working_warns(shape_of: ShapeOf) -> None:
    request = SizingRequest(
        shape=shape_of("llama-3-8b"), device=L4, max_model_len=2048, gpu_memory_utilization=0.82, expected_tokens=160
    )
    automatic, own = plan(request).max_num_seqs, plan(replace(request, max_num_seqs=512))
    assert own.max_num_seqs == 512
    assert f"caution: only {automatic} sequences fit at once" in "\n".join(own.explanation)


def test_a_target_that_one_sequence_misses_is_infeasible(shape_of: ShapeOf) -> None:
    request = SizingRequest(shape=shape_of("llama-3-8b"), device=L4, max_model_len=2048, itl_p99_s=0.020)
    assert plan(request).itl_feasible is False
    assert plan(request).max_num_seqs == 1
    assert plan(replace(request, itl_p99_s=0.080)).itl_feasible is True


def test_the_target_holds_at_max_num_seqs_and_is_missed_one_above(shape_of: ShapeOf) -> None:
    target_s = 0.0065
    answer = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=256, itl_p99_s=target_s))
    above = plan(
        SizingRequest(
            shape=shape_of("llama-3-8b"), device=H100, max_model_len=256, max_num_seqs=answer.max_num_seqs + 1
        )
    )
    assert answer.decode_step_s is not None
    assert above.decode_step_s is not None
    assert answer.decode_step_s <= target_s < above.decode_step_s


def test_a_model_too_large_for_its_gpu_has_no_sequences(shape_of: ShapeOf) -> None:
    answer = plan(SizingRequest(shape=shape_of("llama-3-70b"), device=H100, max_model_len=8192))
    assert (answer.fits, answer.max_num_seqs, answer.num_blocks, answer.decode_step_s) == (False, 0, 0, None)
    assert answer.shortfall_bytes > 60 * GIB
    assert answer.remedies


def test_a_container_without_a_gpu_is_sized_by_its_memory(shape_of: ShapeOf) -> None:
    request = SizingRequest(shape=shape_of("qwen3-0.6b"), device=CPU(8 * GIB), max_model_len=1024)
    assert plan(request).fits
    assert not plan(replace(request, device=CPU(3 * GIB // 2))).fits


def test_weights_that_were_read_replace_the_counted_ones(shape_of: ShapeOf) -> None:
    quantised = replace(shape_of("llama-3-70b"), quantization="awq")
    answer = plan(SizingRequest(shape=quantised, device=H100, max_model_len=8192, weights_bytes=40 * GIB))
    assert (answer.weights_bytes, answer.fits) == (40 * GIB, True)


def test_the_models_own_length_is_taken_where_none_is_asked_for(shape_of: ShapeOf) -> None:
    assert plan(SizingRequest(shape=shape_of("llama-3-8b"), device=H100)).max_model_len == 8192


def test_the_json_keys_are_those_that_users_read(shape_of: ShapeOf) -> None:
    document = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=H100)).to_dict()
    assert {
        "weights_bytes", "kv_bytes_per_token", "overhead_bytes", "kv_pool_bytes", "block_size", "num_blocks",
        "max_num_seqs", "limited_by", "fits", "explanation",
    } <= set(document)  # fmt: skip
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, r"dtype is 'int8', expected one of auto, bfloat16"),
        ({"dtype": "fp8"}, r"dtype is 'fp8'"),
        ({"kv_dtype": "int4"}, r"kv_dtype is 'int4', expected one of auto, bfloat16, float16, float32, fp8"),
        ({"expected_tokens": 8193}, r"expected_tokens is 8193, expected 1 to max_model_len 8192"),
        ({"max_model_len": 8193}, r"max_model_len 8193 is longer than the 8192 positions the model knows"),
        (
            {"max_num_batched_tokens": 10**12},
            r"max_num_batched_tokens is 1000000000000, expected at least 1 and less than",
        ),
        ({"max_model_len": 0}, r"max_model_len is 0, expected at least 1"),
        ({"max_num_seqs": 0}, r"max_num_seqs is 0, expected 1 to 1024"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, r"max_num_seqs is 65, expected 1 to 64: more would only"),
        ({"block_size": 0}, r"block_size is 0, expected at least 1"),
        ({"max_num_batched_tokens": -1}, r"max_num_batched_tokens is -1, expected at least 1"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization is 1.1, expected above 0, at most 1"),
        ({"gpu_memory_utilization": float("nan")}, r"gpu_memory_utilization is nan"),
        ({"device_count": 3}, r"32 heads \(8 of them KV\) cannot be split over 3 GPUs: use 1, 2, 4, 8, 16"),
        ({"device_count": 0}, r"device_count is 0, expected at least 1"),
        ({"device": CPU(GIB), "device_count": 2}, r"device_count is 2, expected 1 on a CPU"),
        ({"overhead_bytes_per_device": -1}, r"overhead_bytes_per_device is -1, expected no negative number"),
    ],
)
def test_contradictory_requests_are_refused(shape_of: ShapeOf, change: dict[str, object], message: str) -> None:
    with pytest.raises(SizingError, match=message):
        SizingRequest(**{"shape": shape_of("llama-3-8b"), "device": H100, **change})  # type: ignore[arg-type]


def test_quantised_weights_are_counted_as_the_device_holds_them(shape_of: ShapeOf) -> None:
    quantised = replace(shape_of("llama-3-70b"), quantization="awq")
    on_gpu = plan(SizingRequest(shape=quantised, device=H100, max_model_len=4096))
    on_cpu = plan(SizingRequest(shape=quantised, device=CPU(80 * GIB), max_model_len=4096))
    fp8 = replace(quantised, quantization="fp8")
    dense = plan(SizingRequest(shape=fp8, device=CPU(80 * GIB), max_model_len=4096))
    int8 = plan(SizingRequest(shape=quantised, device=CPU(80 * GIB), max_model_len=4096, quantization="int8"))
    assert on_gpu.weights_bytes / GIB == pytest.approx(37.3, abs=0.1)  # 68.5 billion x 0.523 + 2.1 billion x 2
    assert on_cpu.weights_bytes == on_gpu.weights_bytes
    assert dense.weights_bytes / GIB == pytest.approx(131.4, abs=0.1)
    assert int8.weights_bytes / GIB == pytest.approx(66.7, abs=0.1)  # the output head, 1.05 billion, in 8 bits as well


def test_gpt_oss_is_not_planned_in_int8(shape_of: ShapeOf) -> None:
    with pytest.raises(SizingError, match="quantization is int8, which is not for gpt_oss: use auto"):
        SizingRequest(shape=shape_of("gpt-oss-20b"), device=H100, quantization="int8")
    dense = replace(shape_of("gpt-oss-120b"), quantization=None)
    answer = plan(SizingRequest(shape=dense, device=H100, max_model_len=4096))
    assert not answer.fits
    assert not any("quantise" in remedy for remedy in answer.remedies)


def test_a_length_is_needed_where_the_shape_knows_none(shape_of: ShapeOf) -> None:
    shape = replace(shape_of("llama-3-8b"), max_position_embeddings=None)
    with pytest.raises(SizingError, match="max_model_len is missing"):
        SizingRequest(shape=shape, device=H100)


@pytest.mark.parametrize(
    ("gpu", "changes", "tokens", "chunk", "reason"),
    [
        ("h100", {}, 8192, 1024, "for a GPU of 79 GiB"),
        ("l4", {}, 2048, 512, "for a GPU of 22 GiB"),
        ("h100", {"max_num_batched_tokens": 4096}, 4096, 512, "as set"),
        ("h100", {"itl_p99_s": 0.05}, 2368, 512, "so that a full step meets the target of the inter-token latency"),
        ("h100", {"itl_p99_s": 0.008}, 512, 512, "the least worth a step, though a full one misses the target"),
        ("h100", {"itl_p99_s": 0.008, "max_num_seqs": 700}, 700, 512, "the least worth a step"),
    ],
)
def test_a_step_has_as_many_tokens_as_memory_and_target_suggest(
    shape_of: ShapeOf, gpu: str, changes: dict[str, Any], tokens: int, chunk: int, reason: str
) -> None:
    answer = plan(SizingRequest(shape=shape_of("llama-3-8b"), device=find_gpu(gpu), max_model_len=4096, **changes))
    assert (answer.max_num_batched_tokens, answer.prefill_chunk_tokens) == (tokens, chunk)
    assert any(line.startswith("step: ") and reason in line for line in answer.explanation)


@pytest.mark.parametrize("target_s", [0.05, 0.1, 0.15, 0.2])
def test_a_step_for_the_target_meets_it_and_so_does_what_is_advised(shape_of: ShapeOf, target_s: float) -> None:
    request = SizingRequest(shape=shape_of("llama-3-8b"), device=H100, max_model_len=4096, itl_p99_s=target_s)
    assert not [line for line in plan(request).explanation if line.startswith("target: ")]
    too_long = plan(replace(request, max_num_batched_tokens=8192)).explanation
    (advice,) = (line for line in too_long if line.startswith("target: "))
    latency = Budget.of(request).latency
    assert latency is not None
    tokens = int(advice.rpartition(" ")[2])
    assert latency.prefill_s(tokens) <= target_s < latency.prefill_s(tokens + 1)


def test_long_steps_keep_no_model_from_fitting(shape_of: ShapeOf) -> None:
    endless = replace(shape_of("llama-3-8b"), max_position_embeddings=None)
    request = SizingRequest(shape=endless, device=H100, max_model_len=4096)
    held = {tokens: _tokens(plan(replace(request, max_num_batched_tokens=tokens))) for tokens in (2048, 8192)}
    assert held[2048] > held[8192]
    answer = plan(replace(request, max_model_len=held[2048]))
    assert (answer.fits, answer.max_num_batched_tokens) == (True, 2048)
    assert any("the activations of longer steps leave no room" in line for line in answer.explanation)
