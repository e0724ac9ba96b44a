"""The terms of the overhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmservice_planner.model.quantization import Quantization
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.gpu import CPU, GIB, find_gpu
from llmservice_planner.sizing.overhead import (
    activation_bytes,
    adapter_term,
    dequantized_bytes,
    fixed_terms,
    logits_row_bytes,
)
from llmservice_planner.sizing.plan import SizingRequest, plan

ShapeOf = Callable[[str], ModelShape]


def _names(shape: ModelShape, device_count: int) -> list[str]:
    return [term.name for term in fixed_terms(shape, find_gpu("h100"), device_count, "bfloat16", 2048)]


def test_activations_of_a_step_are_the_wider_half_of_a_layer(shape_of: ShapeOf) -> None:
    # residual and normed input in bf16, the norm in float32; gate, up and the activated gate
    per_token = 2 * 4096 * 2 + 4096 * 4 + 3 * 14336 * 2
    assert activation_bytes(shape_of("llama-3-8b"), 1, "bfloat16", 2048) == 2048 * per_token


def test_activations_split_over_gpus_but_for_the_residual(shape_of: ShapeOf) -> None:
    per_token = 2 * 4096 * 2 + 4096 * 4 + 3 * 14336 * 2 // 4
    assert activation_bytes(shape_of("llama-3-8b"), 4, "bfloat16", 1) == per_token


def test_a_token_of_a_mixture_has_a_row_for_each_of_its_experts(shape_of: ShapeOf) -> None:
    per_token = 2 * 2048 * 2 + 2048 * 4 + 8 * (3 * 768 + 2 * 2048) * 2
    assert activation_bytes(shape_of("qwen3-30b-a3b"), 1, "bfloat16", 1) == per_token


def test_one_gpu_needs_no_nccl_buffers(shape_of: ShapeOf) -> None:
    assert "NCCL buffers" not in _names(shape_of("llama-3-8b"), 1)
    assert "NCCL buffers" in _names(shape_of("llama-3-8b"), 2)


def test_latents_are_repeated_on_every_gpu(shape_of: ShapeOf) -> None:
    terms = fixed_terms(shape_of("deepseek-v3"), find_gpu("h200"), 8, "bfloat16", 2048)
    repeated = next(term.total_bytes for term in terms if term.name.startswith("weights that every GPU repeats"))
    assert 6 * GIB < repeated < 20 * GIB


def test_a_cpu_has_no_context_and_no_graphs(shape_of: ShapeOf) -> None:
    names = [term.name for term in fixed_terms(shape_of("llama-3-8b"), CPU(GIB), 1, "float32", 512)]
    assert names == ["Python, PyTorch and the tokenizer", "activations of a step of 512 tokens"]


def test_on_a_cpu_a_tied_head_takes_memory_of_its_own(shape_of: ShapeOf) -> None:
    shape, bytes_of_head = shape_of("llama-3.2-1b"), 128256 * 2048 * 2
    on_cpu, on_gpu = (plan(SizingRequest(shape=shape, device=each)) for each in (CPU(64 * GIB), find_gpu("l4")))
    assert on_cpu.weights_bytes - on_gpu.weights_bytes == bytes_of_head
    assert not any("tied" in term.name for term in (*on_cpu.overhead, *on_gpu.overhead))


def test_a_row_of_logits_is_as_wide_as_the_vocabulary(shape_of: ShapeOf) -> None:
    assert logits_row_bytes(shape_of("llama-3-8b")) == 128256 * 16


def test_an_adapter_of_llama_3_8b_takes_its_factors_on_every_layer(shape_of: ShapeOf) -> None:
    per_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)  # q and o, k and v, gate, up and down
    assert shape_of("llama-3-8b").adapter_slot_bytes(16, "bfloat16") == 16 * (32 * per_layer + 4096 + 128256) * 2
    on_gpu = adapter_term(shape_of("llama-3-8b"), "bfloat16", 4, 16, experts=False, on_cpu=False)
    on_cpu = adapter_term(shape_of("llama-3-8b"), "bfloat16", 4, 16, experts=False, on_cpu=True)
    assert on_cpu.total_bytes * 4 == on_gpu.total_bytes * 5


def test_an_adapter_of_deepseek_v3_has_factors_of_latent_attention_and_routers(shape_of: ShapeOf) -> None:
    queries, latents, output = (7168 + 1536) + (1536 + 128 * 192), 7168 + 576, 128 * 128 + 7168
    attention = queries + latents + (512 + 128 * 256) + output  # with what makes keys and values of latents
    dense, sparse = 3 * (7168 + 18432), (7168 + 256) + 3 * (7168 + 2048)
    features = 61 * attention + 3 * dense + 58 * sparse + 7168 + 129280
    assert shape_of("deepseek-v3").adapter_slot_bytes(16, "bfloat16") == 16 * features * 2


GATE_UP = 2 * 14336 * 4096 * 2  # of Llama 3 8B, in 16 bits


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "num_bytes"),
    [
        ("compressed-tensors/int4/1x128", "auto", GATE_UP),
        ("compressed-tensors/int4/1x128", "dense", 0),  # dequantised once, at load
        ("fp8", "auto", GATE_UP),  # blocks of 128 by 128
        ("compressed-tensors/float8/fp8-activations", "auto", 0),  # multiplied as they are
        (None, "auto", 0),
        (None, "int8", GATE_UP),
    ],
)
def test_a_gpu_dequantises_the_largest_matrix_for_long_steps(
    shape_of: ShapeOf, checkpoint: str | None, quantization: Quantization, num_bytes: int
) -> None:
    shape = replace(shape_of("llama-3-8b"), quantization=checkpoint)
    assert dequantized_bytes(shape, "bfloat16", quantization) == num_bytes
    terms = fixed_terms(shape, find_gpu("l4"), 1, "bfloat16", 2048, quantization)
    assert sum(term.total_bytes for term in terms if "dequantised" in term.name) == num_bytes
