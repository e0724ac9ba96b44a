"""Our kernels: agreement with torch, share of the GPU's ceilings, the choice of chunk attention, and sampling."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu_bench.bench import Bench, larger_error
from gpu_bench.device import host_seconds, seconds
from gpu_bench.sections import Findings
from gpu_bench.sizes import Sizes
from llmservice_bench.results import Check
from llmservice_server.backend.agreement import BOUNDS, Case, relative_error
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.backend import TritonLayerOps, why_unusable
from llmservice_server.backend.cuda.kernels import sampling as by_kernel
from llmservice_server.backend.cuda.kernels.jit import FP8
from llmservice_server.backend.cuda.varlen import choose_chunk_attention
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch import sampler as by_torch
from llmservice_server.backend.torch.layer_ops import TorchLayerOps
from llmservice_server.engine.request import Request
from llmservice_server.sampling.sampler import Sampler
from llmservice_server.types.messages import GenerateRequest, SamplingParams

_BLOCK_SIZE = 16
_BOUNDS = {str(dtype).removeprefix("torch."): bound for dtype, bound in BOUNDS.items()} | {"fp8 cache": 3e-2}
"""Both round to the nearest e4m3, but sum in a different order."""


def shapes(sizes: Sizes) -> Iterator[tuple[torch.dtype, KVCacheShape]]:
    """Every dtype with every head dimension; block sizes and groups alternate, as each shape must be compiled."""
    blocks_and_groups = itertools.cycle(itertools.product(sizes.block_sizes, sizes.groups))
    for head_dim, (dtype, cache_dtype) in itertools.product(
        sizes.head_dims, [(each, each) for each in BOUNDS] + [(torch.bfloat16, FP8)]
    ):
        block_size, group = next(blocks_and_groups)
        yield dtype, KVCacheShape(*group, head_dim, (None, 100), block_size, cache_dtype)


def agreement(bench: Bench) -> Findings:
    """The greatest relative error of each dtype, over head dimensions, block sizes, groups, windows and lengths."""
    worst: dict[str, float] = {}
    compared = list(shapes(bench.sizes))
    for (dtype, shape), spans in itertools.product(compared, bench.sizes.spans):
        error = relative_error(Case(shape, dtype, spans), TritonAttention, bench.gpu.device)
        name = "fp8 cache" if shape.dtype == FP8 else str(dtype).removeprefix("torch.")
        worst[name] = larger_error(worst.get(name, 0.0), error)
    return Findings(
        rows=[{"part": "agreement", "dtype": name, "relative error": error} for name, error in worst.items()],
        checks=[
            Check(f"attention differs from torch's, {name} (relative)", f"<= {_BOUNDS[name]}", error)
            for name, error in worst.items()
        ]
        + [_layer_ops(dtype, bench) for dtype in BOUNDS],
        notes=[
            f"{len(compared)} attention shapes were compared with torch, with NaN in unused slots and fragmented tables"
        ],
    )


def _layer_ops(dtype: torch.dtype, bench: Bench) -> Check:
    ours, theirs, device = TritonLayerOps(), TorchLayerOps(), bench.gpu.device
    hidden_size, worst = bench.sizes.config["hidden_size"], 0.0
    for rows, size in ((1, hidden_size), (33, hidden_size), (7, 896)):
        hidden, delta = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
        weight = torch.rand(size, device=device).to(dtype)
        gate_up = torch.randn(rows, 2 * size, device=device).to(dtype)
        pairs = (
            (ours.add_norm(hidden.clone(), delta, weight, 1e-5), theirs.add_norm(hidden.clone(), delta, weight, 1e-5)),
            (ours.gated(gate_up, "silu"), theirs.gated(gate_up, "silu")),
        )
        for mine, other in pairs:
            worst = larger_error(worst, float((mine.float() - other.float()).norm() / other.float().norm()))
    return Check(f"norms and activations differ from torch's, {dtype} (relative)", f"<= {BOUNDS[dtype]}", worst)


def speed(bench: Bench) -> Findings:
    """Paged decode and prefill attention of the model's shape, as shares of copy bandwidth and matmul rate."""
    found = Findings()
    for cache_dtype, batch in itertools.product((bench.sizes.dtype, FP8), bench.sizes.kernel_batches):
        found.rows.append(_decode(bench, cache_dtype, batch))
    for num_tokens, length in bench.sizes.prompts:
        found.rows.append(_prefill(bench, num_tokens, length))
    return found


def _decode(bench: Bench, cache_dtype: torch.dtype, batch: int) -> dict[str, Any]:
    """Paged decode over so many layers that the KV cache of the first is no longer in L2."""
    sizes, context = bench.sizes, bench.sizes.context
    blocks_each = -(-context // _BLOCK_SIZE)
    layer = KVCacheShape(*sizes.heads, (None,), _BLOCK_SIZE, cache_dtype)
    read = batch * blocks_each * layer.bytes_per_block
    shape = replace(layer, windows=(None,) * max(1, -(-sizes.cold_bytes // read)))
    tables = (1 + torch.randperm(batch * blocks_each)).view(batch, blocks_each).tolist()
    decodes = StepInput.of((context - 1, 1, table) for table in tables)
    taken_s = _seconds_per_layer(bench, shape, 1 + batch * blocks_each, decodes)
    return {
        "part": "paged decode", "cache": str(cache_dtype), "batch": batch, "context": context,
        "us": taken_s * 1e6, "share of copy bandwidth": read / taken_s / bench.ceilings.copy_bytes_per_s,
    }  # fmt: skip


def _prefill(bench: Bench, num_tokens: int, length: int) -> dict[str, Any]:
    heads, _, head_dim = bench.sizes.heads
    shape = KVCacheShape(*bench.sizes.heads, (None,), _BLOCK_SIZE, bench.sizes.dtype)
    count, blocks_each = num_tokens // length, -(-length // _BLOCK_SIZE)
    prompts = StepInput.of(
        (0, length, range(1 + place * blocks_each, 1 + (place + 1) * blocks_each)) for place in range(count)
    )
    taken_s = _seconds_per_layer(bench, shape, 1 + count * blocks_each, prompts)
    flops = count * 4 * heads * head_dim * length * (length + 1) / 2
    return {
        "part": "prefill attention", "tokens": num_tokens, "prompt": length,
        "us": taken_s * 1e6, "share of matmul rate": flops / taken_s / bench.ceilings.matmul_flops,
    }  # fmt: skip


def _seconds_per_layer(bench: Bench, shape: KVCacheShape, num_blocks: int, step: StepInput) -> float:
    """Device seconds per layer to store keys and values and to compute attention."""
    attention = TritonAttention(shape, num_blocks, bench.gpu.device)
    for cache in attention.caches:
        cache.zero_()
    attend, num_tokens = attention.prepare(step), len(step.token_ids)
    width = shape.num_heads + 2 * shape.num_kv_heads
    fused = torch.randn(num_tokens, width, shape.head_dim, dtype=bench.sizes.dtype, device=bench.gpu.device)

    def layers() -> None:
        for layer in range(len(shape.windows)):
            attend(layer, fused[:, : shape.num_heads], fused[:, shape.num_heads :])

    return bench.gpu.device_s(layers) / len(shape.windows)


def attention_race(bench: Bench) -> Findings:
    """The choice of `--attention auto` for several chunk sizes, with and without a window."""
    found, sizes = Findings(), bench.sizes
    for window in (None, sizes.context):
        shape = KVCacheShape(*sizes.heads, (window,), 16, sizes.dtype)
        for num_tokens in sizes.race_tokens:
            choice = choose_chunk_attention(shape, sizes.dtype, bench.gpu.device, num_tokens)
            found.rows.append({
                "part": "attention race", "window": window, "chunk": num_tokens // 2, "after": num_tokens // 2,
                "winner": choice.name, "times": choice.reason,
            })  # fmt: skip
    return found


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "everything": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.3,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 4000, "logprobs": 5,
        "logit_bias": {7: -1.0}, "stop_token_ids": (2,),
    },
}  # fmt: skip


def sampling(bench: Bench) -> Findings:
    """GPU and host time of sampling, by sampling parameters, with the mask and the draw of our kernels and of torch."""
    gpu, vocab_size = bench.gpu, bench.sizes.vocab_size
    problem = why_unusable(by_kernel.top_k_top_p, by_kernel.invert, vocab_size, gpu.device)
    found = Findings(checks=[Check("our sampling kernels agree with torch", "= 1", problem is None)])
    if problem is not None:
        found.notes.append(f"the sampling kernels: {problem}")
    for batch in bench.sizes.sampling_batches:
        logits = torch.randn(batch, vocab_size, device=gpu.device) * 3
        for kind, options in KINDS.items():
            requests = [_sampling_request(number, options) for number in range(batch)]
            for name, by in (("kernels", by_kernel), ("torch", by_torch)):
                choose = partial(by_torch.choose, mask=by.top_k_top_p, pick=by.invert)
                sampler, scratch = Sampler(choose, by_torch.penalize), torch.empty_like(logits)

                def draw(sampler=sampler, scratch=scratch, logits=logits, requests=requests) -> None:  # type: ignore[no-untyped-def]
                    sampler.draw(scratch.copy_(logits), requests)

                found.rows.append({
                    "part": "sampling", "kind": kind, "by": name, "batch": batch, "vocabulary": vocab_size,
                    "GPU ms": seconds(gpu, draw) * 1e3, "host ms": host_seconds(gpu, draw) * 1e3,
                })  # fmt: skip
    return found


def _sampling_request(number: int, options: dict[str, Any]) -> Request:
    message = GenerateRequest(
        request_id=str(number),
        prompt_token_ids=list(range(number, number + 256)),
        sampling=SamplingParams(max_tokens=512, **options),
        arrival_s=0.0,
    )
    return Request.of(message, number, seed=number, eos_token_ids=frozenset())
