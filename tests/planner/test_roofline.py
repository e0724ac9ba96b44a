"""Latency at the roofline: bandwidth below the ridge, arithmetic above it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmservice_planner.gpu import GIB, cpu_device, find_gpu
from llmservice_planner.roofline import ATTAINABLE, Roofline
from llmservice_planner.shape import ModelShape

ShapeOf = Callable[[str], ModelShape]
A100_AT_2_TB_S = replace(find_gpu("a100-80gb"), bandwidth_bytes_per_s=2e12)


def _roofline(shape: ModelShape, device_count: int = 1, dtype: str = "bfloat16") -> Roofline:
    weights = shape.num_parameters * (4 if dtype == "float32" else 2)
    kv_bytes = shape.kv_bytes_per_token(dtype, device_count)
    roofline = Roofline.of(shape, A100_AT_2_TB_S, device_count, dtype, weights, kv_bytes)
    assert roofline is not None
    return roofline


def test_the_ridge_of_an_a100_is_156_tokens(shape_of: ShapeOf) -> None:
    assert _roofline(shape_of("llama-3-70b")).ridge_tokens == 156


def test_the_ridge_does_not_move_with_the_number_of_gpus(shape_of: ShapeOf) -> None:
    assert _roofline(shape_of("llama-3-70b"), device_count=4).ridge_tokens == 156


def test_a_70b_step_is_one_read_of_its_weights_for_one_user_or_for_64(shape_of: ShapeOf) -> None:
    roofline = _roofline(shape_of("llama-3-70b"))
    assert roofline.decode_step_s(1, 0) * ATTAINABLE == pytest.approx(0.070, abs=0.001)  # 140 GB at 2 TB/s
    assert roofline.decode_step_s(64, 0) == roofline.decode_step_s(1, 0)


def test_the_kv_cache_of_every_sequence_is_read_too(shape_of: ShapeOf) -> None:
    roofline = _roofline(shape_of("llama-3-8b"))
    extra_s = roofline.decode_step_s(8, 1000) - roofline.decode_step_s(8, 0)
    assert extra_s == pytest.approx(8 * 1000 * 131072 / (2e12 * ATTAINABLE))


def test_past_the_ridge_arithmetic_takes_longer(shape_of: ShapeOf) -> None:
    roofline = _roofline(shape_of("llama-3-8b"))
    ridge = roofline.ridge_tokens
    assert roofline.decode_step_s(4 * ridge, 0) == pytest.approx(4 * roofline.decode_step_s(1, 0), rel=0.03)


def test_prefill_is_bound_by_arithmetic(shape_of: ShapeOf) -> None:
    roofline = _roofline(shape_of("llama-3-8b"))
    assert roofline.prefill_s(4096) == pytest.approx(2 * 8.03e9 * 4096 / (312e12 * ATTAINABLE), rel=0.01)


def test_few_tokens_read_few_experts(shape_of: ShapeOf) -> None:
    roofline = _roofline(shape_of("qwen3-30b-a3b"))
    active_share = shape_of("qwen3-30b-a3b").active_parameters / shape_of("qwen3-30b-a3b").num_parameters
    alone = roofline.decode_step_s(1, 0) * roofline.bandwidth_bytes_per_s / roofline.weights_bytes
    assert alone == pytest.approx(active_share)
    assert roofline.decode_step_s(256, 0) > 5 * roofline.decode_step_s(1, 0)


def test_float32_runs_outside_the_tensor_cores(shape_of: ShapeOf) -> None:
    shape = shape_of("llama-3-8b")
    assert _roofline(shape, dtype="float32").prefill_s(4096) > 4 * _roofline(shape).prefill_s(4096)


def test_a_device_of_unknown_rates_has_no_roofline(shape_of: ShapeOf) -> None:
    assert Roofline.of(shape_of("llama-3-8b"), cpu_device(GIB), 1, "float32", 1, 1) is None
