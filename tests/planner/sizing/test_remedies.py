"""Every remedy is true: applied to the request, it makes it fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.model.shape import ModelShape
from llmservice_planner.model.weight_counts import WeightCounts
from llmservice_planner.sizing.gpu import CPU, GIB, GPUS, find_gpu
from llmservice_planner.sizing.plan import SizingRequest, plan
from llmservice_planner.sizing.remedies import find_remedies, longest_model_len

ShapeOf = Callable[[str], ModelShape]

_KINDS = {
    "length": r"lower max_model_len from \d+ to (\d+)",
    "fp8": r"use kvCacheDtype: fp8",
    "int8": r"quantise the weights with quantization: int8",
    "quantised": r"use a checkpoint quantised to (\d) bits",
    "count": r"share the model between (\d+) x ",
    "gpu": r"use a larger GPU: (?:\d+ x )?(\S+) ",
    "container": r"give the container at least (\d+)Mi of memory",
}
_CODES = {"8": "compressed-tensors/int8", "4": "awq"}


def _applied(request: SizingRequest, remedy: str) -> tuple[str, SizingRequest]:
    kind, match = next((kind, match) for kind, pattern in _KINDS.items() if (match := re.match(pattern, remedy)))
    figure = match[1] if match.groups() else ""
    changes: dict[str, Callable[[], SizingRequest]] = {
        "length": lambda: replace(request, max_model_len=int(figure)),
        "fp8": lambda: replace(request, kv_dtype="fp8"),
        "int8": lambda: replace(request, quantization="int8"),
        "quantised": lambda: replace(request, shape=replace(request.shape, quantization=_CODES[figure])),
        "count": lambda: replace(request, device_count=int(figure)),
        "gpu": lambda: replace(request, device=GPUS[figure]),
        "container": lambda: replace(request, device=CPU(int(figure) * 2**20)),
    }
    return kind, changes[kind]()


def _request(shape: ModelShape, gpu: str, length: int, count: int = 1) -> SizingRequest:
    shape = replace(shape, max_position_embeddings=None)
    return SizingRequest(shape=shape, device=find_gpu(gpu), device_count=count, max_model_len=length)


@pytest.mark.parametrize(
    ("model", "gpu", "count", "length", "kinds"),
    [
        ("llama-3-8b", "l4", 1, 32768, {"length", "fp8", "quantised", "count", "gpu"}),
        ("llama-3-8b", "a10g", 1, 32768, {"length", "quantised", "count", "gpu"}),  # no fp8 units
        ("llama-3-8b", "l4", 1, 131072, {"length", "count", "gpu"}),  # too long even in fp8
        ("llama-3-70b", "h100-80gb", 1, 8192, {"quantised", "count", "gpu"}),  # the weights alone are too large
        ("llama-3-70b", "h100-80gb", 2, 32768, {"length", "fp8", "quantised", "count", "gpu"}),
        ("llama-3-70b", "b200-180gb", 1, 131072, {"length", "fp8", "quantised", "count"}),  # the largest of its vendor
        ("mistral-7b", "t4", 1, 4096, {"quantised", "count", "gpu"}),
    ],
)
def test_remedies_make_it_fit(
    shape_of: ShapeOf, model: str, gpu: str, count: int, length: int, kinds: set[str]
) -> None:
    request = _request(shape_of(model), gpu, length, count)
    assert not plan(request).fits
    applied = dict(_applied(request, remedy) for remedy in plan(request).remedies)
    assert set(applied) == kinds
    assert all(plan(changed).fits for changed in applied.values())


def test_what_fits_needs_no_remedy(shape_of: ShapeOf) -> None:
    assert plan(_request(shape_of("llama-3-8b"), "h100", 8192)).remedies == ()


def test_a_smaller_count_than_the_proposed_one_does_not_fit(shape_of: ShapeOf) -> None:
    request = _request(shape_of("llama-3-70b"), "a100-40gb", 8192)
    kind, changed = _applied(request, plan(request).remedies[0])
    assert (kind, changed.device_count) == ("count", 4)
    assert not plan(replace(changed, device_count=2)).fits


def test_a_smaller_gpu_than_the_proposed_one_does_not_fit(shape_of: ShapeOf) -> None:
    request = _request(shape_of("llama-3-8b"), "t4", 8192)
    proposed = dict(_applied(request, remedy) for remedy in plan(request).remedies)["gpu"].device
    for gpu in GPUS.values():
        if gpu.resource_name == "nvidia.com/gpu" and gpu.memory_bytes < proposed.memory_bytes:
            assert not plan(replace(request, device=gpu)).fits


def test_a_container_gets_its_required_memory(shape_of: ShapeOf) -> None:
    request = SizingRequest(shape=shape_of("qwen3-0.6b"), device=CPU(GIB), max_model_len=4096)
    (remedy,) = plan(request).remedies
    kind, changed = _applied(request, remedy)
    assert kind == "container"
    assert plan(changed).fits
    assert not plan(replace(changed, device=CPU(changed.device.memory_bytes - 3 * 2**20))).fits


@pytest.mark.parametrize(("gib", "kinds"), [(12, {"container", "int8"}), (9, {"container", "quantised"})])
def test_quantised_weights_make_it_fit_a_container(shape_of: ShapeOf, gib: int, kinds: set[str]) -> None:
    """In 8 bits, or in 4 where those would be too large."""
    request = SizingRequest(shape=shape_of("llama-3-8b"), device=CPU(gib * GIB), max_model_len=2048)
    applied = dict(_applied(request, remedy) for remedy in plan(request).remedies)
    assert set(applied) == kinds
    assert all(plan(changed).fits for changed in applied.values())


def test_expected_tokens_shrink_with_a_shorter_length(shape_of: ShapeOf) -> None:
    request = replace(_request(shape_of("llama-3-8b"), "l4", 131072), expected_tokens=100_000)
    assert 1 < longest_model_len(request) < 100_000


@given(st.integers(15, 80), st.integers(1, 300_000), st.sampled_from([None, 512]))
def test_the_longest_length_fits_and_one_token_more_does_not(gib: int, length: int, window: int | None) -> None:
    shape = ModelShape(
        layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=32000,
        sliding_window=window,
        sliding_layers=16 if window else 0,
    )
    device = replace(find_gpu("h100"), memory_bytes=gib * GIB)
    request = SizingRequest(shape=shape, device=device, max_model_len=length)
    longest = longest_model_len(request)
    if longest:
        assert plan(replace(request, max_model_len=longest)).fits
    if longest < length:
        assert not plan(replace(request, max_model_len=longest + 1)).fits


@pytest.mark.parametrize("counts", [None, WeightCounts(other_parameters=10**9)])
def test_a_model_of_unknown_layout_gets_remedies_too(shape_of: ShapeOf, counts: WeightCounts | None) -> None:
    """Its weights are known from the files, and how large others would be is not."""
    shape = replace(shape_of("llama-3-8b"), architecture="unknown", counts=counts)
    request = replace(_request(shape_of("llama-3-8b"), "t4", 8192), shape=shape, weights_bytes=40 * GIB)
    assert {kind for kind, _ in (_applied(request, remedy) for remedy in find_remedies(request))} == {"gpu", "count"}
