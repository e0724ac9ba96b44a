"""The lines of the explanation contain every figure and the caveats that apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.gpu import find_gpu
from llmservice_planner.sizing.plan import SizingRequest, plan

ShapeOf = Callable[[str], ModelShape]


def _request(shape: ModelShape, gpu: str, count: int = 1) -> SizingRequest:
    return SizingRequest(shape=shape, device=find_gpu(gpu), device_count=count, max_model_len=4096)


def _line(request: SizingRequest, label: str) -> str:
    return next(line for line in plan(request).explanation if line.startswith(f"{label}: ")).split(": ", 1)[1]


def _labels(request: SizingRequest) -> list[str]:
    return [line.split(": ", 1)[0] for line in plan(request).explanation]


def test_the_explanation_goes_from_the_model_to_the_answer(shape_of: ShapeOf) -> None:
    labels = _labels(_request(shape_of("llama-3-8b"), "h100"))
    in_order = ["model", "weights", "kv per token", "memory", "overhead", "kv pool", "blocks", "guaranteed", "expected"]
    in_order += ["speed", "bounds", "answer"]
    assert [label for label in dict.fromkeys(labels) if label in in_order] == in_order


@pytest.mark.parametrize(
    ("model", "count", "label", "text"),
    [
        ("llama-3-8b", 1, "weights", "8.030 billion parameters x 2 bytes (bfloat16) = 14.96 GiB"),
        ("llama-3-8b", 1, "kv per token", "2 x 32 layers x 8 KV heads x 128 x 2 bytes (bfloat16) = 128.00 KiB"),
        ("llama-3-8b", 16, "kv per token", "2 x 32 layers x 16 KV heads (8 repeated over 16 GPUs) x 128"),
        ("qwen3-30b-a3b", 1, "model", "8 of 128 experts a token, 3.35 billion active"),
        ("mistral-7b", 1, "guaranteed", "32 of 32 layers slide over 4096 tokens"),
        ("llama-3-8b", 1, "memory", "1 x h200-141gb, 139.72 GiB seen by a process, 90% of it usable = 125.75 GiB"),
    ],
)
def test_a_line_shows_its_figures(shape_of: ShapeOf, model: str, count: int, label: str, text: str) -> None:
    assert text in _line(_request(shape_of(model), "h200", count), label)


def test_a_latent_is_in_the_explanation(shape_of: ShapeOf) -> None:
    request = _request(replace(shape_of("deepseek-v3"), quantization=None), "b200", 8)
    assert _line(request, "kv per token").startswith(
        "61 layers x (512 latent + 64 rope) x 2 bytes (bfloat16) x 8 GPUs (every GPU keeps the latent) = "
    )


def test_weights_read_from_headers_are_marked(shape_of: ShapeOf) -> None:
    request = replace(_request(shape_of("llama-3-8b"), "h100"), weights_bytes=2**30)
    assert _line(request, "weights") == "1.00 GiB, read from the checkpoint's headers"


def test_groups_of_layers_are_mentioned(shape_of: ShapeOf) -> None:
    line = _line(_request(shape_of("gemma-2-9b"), "h100"), "blocks")
    assert "of 16 tokens in one of 2 groups of 21 layers" in line
    assert line.endswith(" tokens, or more as windows slide")


def test_a_gpu_without_bfloat16_is_pointed_out(shape_of: ShapeOf) -> None:
    request = _request(shape_of("llama-3.2-1b"), "t4")
    assert _line(request, "caution") == "t4 has no bfloat16 units: use dtype float16"
    assert "caution" not in _labels(replace(request, dtype="float16"))


def test_a_chunk_that_misses_the_target_comes_with_the_budget_that_meets_it(shape_of: ShapeOf) -> None:
    request = replace(_request(shape_of("llama-3-8b"), "h100"), itl_p99_s=0.020, max_num_batched_tokens=2048)
    advice = _line(request, "target")
    assert "past 20.0 ms" in advice
    kept = replace(request, max_num_batched_tokens=int(advice.rsplit(" ", 1)[1]))
    assert "target" not in _labels(kept)


def test_what_does_not_fit_says_what_is_missing(shape_of: ShapeOf) -> None:
    answer = plan(_request(shape_of("llama-3-70b"), "h100"))
    assert answer.explanation[-1] == f"answer: does not fit, {format_bytes(answer.shortfall_bytes)} are missing"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (-(2**30), "-1.00 GiB"), (2**40, "1024.00 GiB")],
)
def test_bytes_have_a_suitable_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text
