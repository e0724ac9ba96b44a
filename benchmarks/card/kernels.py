"""Our kernels against torch on the card, in every shape that they are made for, and what they reach of its ceilings."""

from __future__ import annotations

import itertools

import torch

from card.ceilings import Ceilings, seconds
from card.section import Findings
from llmservice_bench.results import Check
from llmservice_server.attention.agreement import BOUNDS, MIXED, Case, relative_error
from llmservice_server.attention.base import KVCacheShape, SequenceSlice
from llmservice_server.attention.triton_backend import TritonAttention
from llmservice_server.kernels.jit import FP8
from llmservice_server.models.layer_ops import TorchLayerOps, TritonLayerOps

CUDA = torch.device("cuda")
FP8_BOUND = 3e-2
"""The card rounds to the nearest e4m3 as the reference does; the products' order is another."""
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama 3 8B
CONTEXT = 1024
LONG = ((4095, 1), (0, 1000), (2047, 513), (300, 1), (0, 1))


def agreement() -> Findings:
    """The greatest relative error of each dtype, over head dimensions, block sizes, groups, windows and lengths."""
    worst: dict[str, float] = {}
    count = 0
    for (dtype, cache_dtype), head_dim, block_size in itertools.product(
        [(each, each) for each in BOUNDS] + [(torch.bfloat16, FP8)], [64, 96, 128, 256], [16, 64, 256]
    ):
        groups = [(8, 2)] if block_size != 16 else [(8, 2), (7, 1), (4, 4)]
        for heads, spans in itertools.product(groups, [MIXED, LONG]):
            shape = KVCacheShape(*heads, head_dim, (None, 100), block_size, cache_dtype)
            error = relative_error(Case(shape, dtype, spans), TritonAttention, CUDA)
            name = "fp8 cache" if cache_dtype == FP8 else str(dtype).removeprefix("torch.")
            worst[name] = max(worst.get(name, 0.0), error if error == error else float("inf"))  # noqa: PLR0124 - NaN
            count += 1
    bounds = {str(dtype).removeprefix("torch."): bound for dtype, bound in BOUNDS.items()} | {"fp8 cache": FP8_BOUND}
    checks = [
        Check(f"attention differs from torch's, {name} (relative)", f"<= {bounds[name]}", error)
        for name, error in worst.items()
    ]
    return Findings(
        rows=[{"part": "agreement", "dtype": name, "relative error": error} for name, error in worst.items()],
        checks=checks + [_layer_ops(dtype) for dtype in BOUNDS],
        notes=[f"{count} shapes of attention were compared with torch, caches poisoned with NaN, tables fragmented"],
    )


def _layer_ops(dtype: torch.dtype) -> Check:
    ours, theirs = TritonLayerOps(), TorchLayerOps()
    worst = 0.0
    for rows, size in ((1, 4096), (33, 4096), (7, 896)):
        hidden, delta = (torch.randn(rows, size, device=CUDA).to(dtype) for _ in range(2))
        weight = torch.rand(size, device=CUDA).to(dtype)
        gate_up = torch.randn(rows, 2 * size, device=CUDA).to(dtype)
        pairs = (
            (ours.add_norm(hidden.clone(), delta, weight, 1e-5), theirs.add_norm(hidden.clone(), delta, weight, 1e-5)),
            (ours.silu_mul(gate_up), theirs.silu_mul(gate_up)),
        )
        for mine, other in pairs:
            worst = max(worst, float((mine.float() - other.float()).norm() / other.float().norm()))
    return Check(f"norms and activations differ from torch's, {dtype} (relative)", f"<= {BOUNDS[dtype]}", worst)


def speed(ceilings: Ceilings) -> Findings:
    """Paged decode in bytes, prefill in FLOPs, at Llama 3 8B's shape: shares of the card's ceilings."""
    found = Findings()
    for cache_dtype, batch in itertools.product((torch.bfloat16, FP8), (1, 8, 32, 64, 256)):
        shape = KVCacheShape(HEADS, KV_HEADS, HEAD_DIM, (None,), 16, cache_dtype)
        blocks_each = CONTEXT // 16
        backend = TritonAttention(shape, 1 + batch * blocks_each, CUDA)
        for cache in backend.caches:
            cache.zero_()
        tables = (1 + torch.randperm(batch * blocks_each)).view(batch, blocks_each).tolist()
        step = backend.prepare([SequenceSlice(CONTEXT - 1, 1, table) for table in tables])
        heads = torch.randn(batch, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=CUDA)
        taken_s = seconds(lambda step=step, heads=heads: step(0, heads[:, :HEADS], heads[:, HEADS:]), repetitions=20)  # type: ignore[misc]
        read = batch * blocks_each * shape.bytes_per_block
        found.rows.append({
            "part": "paged decode", "cache": str(cache_dtype), "batch": batch, "context": CONTEXT,
            "us": taken_s * 1e6, "share of copy bandwidth": read / taken_s / ceilings.copy_bytes_per_s,
        })  # fmt: skip
    for num_tokens, length in ((2048, 2048), (8192, 8192), (8192, 1024)):
        shape = KVCacheShape(HEADS, KV_HEADS, HEAD_DIM, (None,), 16, torch.bfloat16)
        count, blocks_each = num_tokens // length, length // 16
        backend = TritonAttention(shape, 1 + count * blocks_each, CUDA)
        slices = [
            SequenceSlice(0, length, range(1 + place * blocks_each, 1 + (place + 1) * blocks_each))
            for place in range(count)
        ]
        step = backend.prepare(slices)
        heads = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=CUDA)
        taken_s = seconds(lambda step=step, heads=heads: step(0, heads[:, :HEADS], heads[:, HEADS:]))  # type: ignore[misc]
        flops = count * 4 * HEADS * HEAD_DIM * length * (length + 1) / 2
        found.rows.append({
            "part": "prefill attention", "tokens": num_tokens, "prompt": length,
            "us": taken_s * 1e6, "share of matmul rate": flops / taken_s / ceilings.matmul_flops,
        })  # fmt: skip
    return found
