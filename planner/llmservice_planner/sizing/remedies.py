"""Changes of a request that would make it fit; each was verified by planning again."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.gpu import CPU, GIB, GPU, GPUS, has_fp8
from llmservice_planner.sizing.request import SizingRequest, can_shard

_MAX_GPUS = 16


def longest_model_len(request: SizingRequest) -> int:
    """The longest max_model_len that fits, at most the requested one; 0 if none does."""
    lengths = range(1, request.model_len + 1)
    return bisect_left(lengths, True, key=lambda length: not _fits_at(request, length))


def _fits_at(request: SizingRequest, length: int) -> bool:
    expected = None if request.expected_tokens is None else min(request.expected_tokens, length)
    return Budget.of(replace(request, max_model_len=length, expected_tokens=expected)).fits


def find_remedies(request: SizingRequest) -> Iterator[str]:
    """Changes that each make `request` fit, which does not, the cheapest first."""
    if length := longest_model_len(request):
        yield f"lower max_model_len from {request.model_len} to {length}"
    is_smaller = has_fp8(request.device) and request.resolved_kv_dtype != "fp8"
    if is_smaller and Budget.of(replace(request, kv_dtype="fp8")).fits:
        yield "use kvCacheDtype: fp8 (--kv-dtype fp8): one byte an element, and a scale"
    yield from _quantized(request)
    if isinstance(request.device, CPU):
        yield f"give the container at least {_memory_needed_mib(request)}Mi of memory"
        return
    if count := _smallest_count(request):
        yield f"share the model between {count} x {request.device.name} (--gpu-count {count}), not yet servable"
    if gpu := _smallest_gpu(request):
        count_prefix = f"{request.device_count} x " if request.device_count > 1 else ""
        yield f"use a larger GPU: {count_prefix}{gpu.name} ({gpu.memory_bytes / GIB:.1f} GiB each)"


def _quantized(request: SizingRequest) -> Iterator[str]:
    """8-bit weights; 4-bit ones only where those would be too large."""
    shape = request.shape
    if shape.quantization or shape.is_encoder or shape.why_not_counted or not shape.takes_int8:
        return
    if request.quantization == "int8":
        return
    counted = replace(request, weights_bytes=None)
    int8 = Budget.of(replace(counted, quantization="int8"))
    if request.on_cpu and int8.fits:
        yield (
            "quantise the weights with quantization: int8 (--quantization int8): "
            f"{format_bytes(int8.weights_bytes)}, on CPUs with AVX-512 VNNI"
        )
        return
    if shape.counts is not None:  # what such a checkpoint would quantise is not known
        return
    for bits, code in ((8, "compressed-tensors/int8"), (4, "awq/int4/1x128/zeros")):
        budget = Budget.of(replace(counted, shape=replace(shape, quantization=code), dtype="auto"))
        if budget.fits:
            yield f"use a checkpoint quantised to {bits} bits: {format_bytes(budget.weights_bytes)} of weights"
            return


def _memory_needed_mib(request: SizingRequest) -> int:
    """The container memory in MiB with which the request fits, rounded up."""
    budget = Budget.of(request)
    needed = (budget.usable_bytes + budget.shortfall_bytes) / request.gpu_memory_utilization
    return math.ceil(needed / 2**20) + 1


def _smallest_count(request: SizingRequest) -> int | None:
    for count in range(request.device_count + 1, _MAX_GPUS + 1):
        if can_shard(request.shape, count) and Budget.of(replace(request, device_count=count)).fits:
            return count
    return None


def _smallest_gpu(request: SizingRequest) -> GPU | None:
    larger = sorted((gpu for gpu in GPUS.values() if _is_larger(gpu, request)), key=lambda gpu: gpu.memory_bytes)
    return next((gpu for gpu in larger if Budget.of(replace(request, device=gpu)).fits), None)


def _is_larger(gpu: GPU, request: SizingRequest) -> bool:
    same_vendor = isinstance(request.device, GPU) and gpu.resource_name == request.device.resource_name
    return same_vendor and gpu.memory_bytes > request.device.memory_bytes
