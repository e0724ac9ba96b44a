"""The latency model: bandwidth below the ridge, arithmetic above it; and what holds of any coefficients."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.gpu import CPU, GIB, GPUS, find_gpu
from llmservice_planner.sizing.latency import (
    ARITHMETIC_SHARE,
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    LatencyError,
    LatencyModel,
    StepBatch,
    attention_pairs,
)

ShapeOf = Callable[[str], ModelShape]
A100_AT_2_TB_S = replace(find_gpu("a100-80gb"), bandwidth_bytes_per_s=2e12)
EMBEDDING_8B = 128256 * 4096

seconds = st.floats(0, 1e-2, allow_subnormal=False)
shares = st.floats(0, 1)
models = st.builds(
    LatencyModel,
    step_s=seconds,
    sequence_s=seconds,
    weights_s=seconds,
    token_s=seconds,
    kv_token_s=seconds,
    pair_s=seconds,
    mixed_s=seconds,
    transfer_s=seconds,
    expert_share=shares,
    expert_idle=shares,
    window_share=shares,
    window_tokens=st.integers(0, 4096),
)
counts = st.integers(0, 100_000)
batches = st.builds(StepBatch, st.integers(0, 1024), counts, counts, st.integers(0, 64), counts)


def _model(shape: ModelShape, device_count: int = 1, dtype: str = "bfloat16") -> LatencyModel:
    weights = shape.num_parameters * (4 if dtype == "float32" else 2)
    kv_bytes = shape.kv_bytes_per_token(dtype, device_count)
    model = LatencyModel.of(shape, A100_AT_2_TB_S, device_count, dtype, weights, kv_bytes)
    assert model is not None
    return model


def _example(**changed: Any) -> LatencyModel:
    return replace(LatencyModel(1e-3, 1e-5, 5e-3, 2e-5, 5e-8, 1e-10), **changed)


@given(models, batches, st.data())
def test_more_of_anything_never_takes_less_time(model: LatencyModel, batch: StepBatch, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([item.name for item in fields(StepBatch)]))
    more = replace(batch, **{name: getattr(batch, name) + data.draw(st.integers(1, 10_000))})
    assert model.seconds(more) >= model.seconds(batch) * (1 - 1e-12)


@given(models, st.integers(0, 300), st.integers(0, 3000), st.integers(0, 200))
def test_a_run_of_decode_steps_takes_the_sum_of_its_steps(
    model: LatencyModel, num_seqs: int, context_each: int, steps: int
) -> None:
    context = num_seqs * context_each + num_seqs // 2
    each = (model.seconds(StepBatch(num_seqs, context + step * num_seqs)) for step in range(steps))
    assert model.decode_run_s(num_seqs, context, steps) == pytest.approx(math.fsum(each), rel=1e-9)


@given(models, st.integers(1, 5000), st.integers(1, 5000))
def test_the_chunks_of_a_prompt_have_all_its_pairs(model: LatencyModel, num_tokens: int, chunk: int) -> None:
    model = replace(model, window_share=0.0)
    only_pairs = LatencyModel(0, 0, 0, 0, 0, pair_s=1.0)
    assert only_pairs.prefill_s(num_tokens, chunk) == pytest.approx(attention_pairs(0, num_tokens), abs=0)
    assert model.prefill_s(num_tokens, chunk) >= model.prefill_s(num_tokens) * (1 - 1e-12)


@given(models)
def test_a_model_survives_json(model: LatencyModel) -> None:
    written = {**json.loads(json.dumps(model.to_dict())), "calibration": {"of": "a server"}}
    assert LatencyModel.from_dict(written) == model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "list, expected an object"),
        ("{", "is no latency model in JSON"),
        ('{"step_s": 1}', "sequence_s, weights_s, token_s, kv_token_s, pair_s are missing"),
        (json.dumps({**_example().to_dict(), "speed": 1}), "unknown coefficient speed"),
        (json.dumps({**_example().to_dict(), "token_s": -1}), "token_s is -1"),
        (json.dumps({**_example().to_dict(), "token_s": "fast"}), "token_s is 'fast'"),
        (json.dumps({**_example().to_dict(), "pair_s": math.nan}), "pair_s is nan"),
        (json.dumps(dict.fromkeys(_example().to_dict(), 0)), "step_s, weights_s and token_s are 0"),
        (json.dumps({**_example().to_dict(), "expert_idle": 2}), "expert_idle is 2, expected at most 1"),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(LatencyError, match=message) as error:
        LatencyModel.read(path)
    assert str(path) in str(error.value)


def test_an_empty_step_takes_no_time() -> None:
    assert _example().seconds(StepBatch(0, 0)) == 0
    assert _example().decode_run_s(0, 0, 5) == 0


def test_the_ridge_of_an_a100_is_near_its_operations_per_byte(shape_of: ShapeOf) -> None:
    expected = 156 * ARITHMETIC_SHARE / BANDWIDTH_SHARE
    assert _model(shape_of("llama-3-70b")).ridge_tokens == pytest.approx(expected, rel=0.03)


def test_the_ridge_does_not_move_with_the_number_of_gpus(shape_of: ShapeOf) -> None:
    shape = shape_of("llama-3-70b")
    assert _model(shape, device_count=4).ridge_tokens == _model(shape).ridge_tokens


def test_a_70b_step_is_one_read_of_its_weights_for_one_user_or_for_64(shape_of: ShapeOf) -> None:
    model = _model(shape_of("llama-3-70b"))
    assert model.weights_s * BANDWIDTH_SHARE == pytest.approx(0.069, abs=0.001)  # 139 GB at 2 TB/s
    assert model.decode_s(64, 0) - model.decode_s(1, 0) == pytest.approx(63 * model.sequence_s)


def test_the_kv_cache_of_every_sequence_is_read_too(shape_of: ShapeOf) -> None:
    model = _model(shape_of("llama-3-8b"))
    extra_s = model.decode_s(8, 1000) - model.decode_s(8, 0)
    assert extra_s == pytest.approx(8 * 1000 * 131072 / (2e12 * BANDWIDTH_SHARE))


def test_layers_with_a_window_read_and_attend_to_no_more_than_it() -> None:
    full, sliding = _example(), _example(window_share=0.5, window_tokens=100)
    assert sliding.decode_s(4, 100) == full.decode_s(4, 100)
    assert sliding.decode_s(4, 300) == pytest.approx(full.decode_s(4, 200))  # half reads 300, half 100
    assert sliding.prefill_s(100_000) < full.prefill_s(100_000)


def test_past_the_ridge_arithmetic_takes_longer(shape_of: ShapeOf) -> None:
    model = _model(shape_of("llama-3-8b"))
    ridge = model.ridge_tokens
    assert ridge is not None
    growth_s = model.decode_s(4 * ridge, 0) - model.decode_s(2 * ridge, 0)
    assert growth_s == pytest.approx(2 * ridge * (model.token_s + model.sequence_s))


def test_prefill_is_bound_by_arithmetic_and_its_quadratic_part(shape_of: ShapeOf) -> None:
    model = _model(shape_of("llama-3-8b"))
    matrices = 2 * (8.03e9 - 2 * EMBEDDING_8B) * 4096 / (312e12 * ARITHMETIC_SHARE)
    attention = 4 * 32 * 4096 * attention_pairs(0, 4096) / (312e12 * ATTENTION_SHARE)
    assert model.prefill_s(4096) == pytest.approx(matrices + attention, rel=0.01)
    assert model.prefill_s(65536) > 1.5 * 16 * model.prefill_s(4096)


def test_few_tokens_read_few_experts(shape_of: ShapeOf) -> None:
    shape = shape_of("qwen3-30b-a3b")
    model = _model(shape)
    read = model.decode_s(1, 0) - model.step_s - model.sequence_s
    embedding = shape.vocab_size * shape.hidden_size
    active_share = (shape.active_parameters - embedding) / (shape.num_parameters - embedding)
    assert read / model.weights_s == pytest.approx(active_share)
    assert model.decode_s(256, 0) > 5 * model.decode_s(1, 0)


def test_few_tokens_read_few_experts_of_4_bits(shape_of: ShapeOf) -> None:
    """gpt-oss-20b: 4 of 32 experts, which have 10.2 of the 12.3 GB that a step of many tokens reads."""
    shape = shape_of("gpt-oss-20b")
    model = LatencyModel.of(shape, find_gpu("h100"), 1, "bfloat16", shape.weights_bytes("bfloat16"), 49152)
    assert model is not None
    read = model.decode_s(1, 0) - model.step_s - model.sequence_s
    assert model.expert_share == pytest.approx(10.15e9 / 12.6e9, abs=0.01)
    assert read / model.weights_s == pytest.approx(1 - model.expert_share * 28 / 32)


def test_one_token_reads_few_experts_of_8_bits_in_code_of_transformers(shape_of: ShapeOf) -> None:
    """DeepSeek V3: 37.4 of 673 GB, 8 of 256 experts in each layer and all else."""
    shape = shape_of("deepseek-v3")
    weights_bytes = shape.weights_bytes("bfloat16")
    model = LatencyModel.of(shape, find_gpu("h200"), 8, "bfloat16", weights_bytes, 49152)
    assert model is not None
    read = (model.decode_s(1, 0) - model.step_s - model.sequence_s) / model.weights_s * weights_bytes
    assert read == pytest.approx(37.4e9, rel=0.03)


def test_float32_runs_outside_the_tensor_cores(shape_of: ShapeOf) -> None:
    shape = shape_of("llama-3-8b")
    assert _model(shape, dtype="float32").prefill_s(4096) > 4 * _model(shape).prefill_s(4096)


@pytest.mark.parametrize(
    ("gpu", "quantization", "wanted", "is_faster"),
    [
        ("h100-80gb", "fp8/float8/fp8-activations", "auto", True),
        ("h100-80gb", "fp8/float8/fp8-activations", "dense", False),  # dequantised at load
        ("h100-80gb", "fp8", "auto", False),  # blocks of 128 x 128: the server multiplies in 16 bits
        ("h100-80gb", "awq", "auto", False),
        ("a100-80gb", "fp8/float8/fp8-activations", "auto", False),  # no fp8 units
    ],
)
def test_fp8_products_run_at_the_fp8_rate_where_the_gpu_has_it(
    shape_of: ShapeOf, gpu: str, quantization: str, wanted: Any, is_faster: bool
) -> None:
    shape = shape_of("llama-3-8b")
    quantized = replace(shape, quantization=quantization)
    plain, other = (
        LatencyModel.of(each, find_gpu(gpu), 1, "bfloat16", 8 * 10**9, 131072, wanted) for each in (shape, quantized)
    )
    assert plain is not None
    assert other is not None
    assert (plain.token_s / other.token_s > 1.9) == is_faster


def test_an_encoder_computes_prompts_in_both_directions_and_decodes_nothing(shape_of: ShapeOf) -> None:
    decoder = shape_of("llama-3-8b")
    encoder = replace(decoder, encoder_parameters=decoder.num_parameters)
    one, other = _model(encoder), _model(decoder)
    assert (one.kv_token_s, one.sequence_s) == (0, 0)
    assert one.pair_s == pytest.approx(2 * other.pair_s)
    assert one.prefill_s(512) == pytest.approx(other.prefill_s(512), rel=0.1)


def test_several_gpus_share_the_work_and_pay_for_their_links(shape_of: ShapeOf) -> None:
    shape = shape_of("llama-3-70b")
    one, four = _model(shape), _model(shape, device_count=4)
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert four.step_s > one.step_s
    assert one.transfer_s == 0
    slow = LatencyModel.of(shape, find_gpu("l40s"), 4, "bfloat16", 1, 1)
    assert slow is not None
    assert slow.transfer_s > 9 * four.transfer_s  # PCIe 4.0 beside NVLink


def test_every_gpu_of_the_catalogue_has_a_model(shape_of: ShapeOf) -> None:
    shape = shape_of("llama-3-8b")
    times = {}
    for name, gpu in GPUS.items():
        model = LatencyModel.of(shape, gpu, 1, "bfloat16", shape.weights_bytes("bfloat16"), 131072)
        assert model is not None
        times[name] = model.decode_s(1, 100)
    assert 4e-3 < times["h100-80gb"] < 8e-3
    assert times["l4"] > 10 * times["h200-141gb"]


def test_a_cpu_has_a_model_only_with_measured_rates(shape_of: ShapeOf) -> None:
    shape = shape_of("llama-3-8b")
    assert LatencyModel.of(shape, CPU(GIB), 1, "float32", 1, 1) is None
    weights = shape.weights_bytes("bfloat16")
    measured = LatencyModel.of(shape, CPU(GIB, "cpu", 50e9, 2e12), 1, "bfloat16", weights, 131072)
    assert measured is not None
    assert measured.weights_s == pytest.approx((weights - 2 * EMBEDDING_8B) / 50e9)
