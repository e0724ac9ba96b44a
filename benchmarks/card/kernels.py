"""Our kernels against torch on the card, in every shape that they are made for, and what they reach of its ceilings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from card.section import Findings
from card.sizes import Sizes
from card.stand import Stand
from llmservice_bench.results import Check
from llmservice_server.attention.agreement import BOUNDS, Case, relative_error
from llmservice_server.attention.base import KVCacheShape, SequenceSlice
from llmservice_server.attention.triton_backend import TritonAttention
from llmservice_server.kernels.jit import FP8
from llmservice_server.models.layer_ops import TorchLayerOps, TritonLayerOps

_BLOCK_SIZE = 16
_BOUNDS = {str(dtype).removeprefix("torch."): bound for dtype, bound in BOUNDS.items()} | {"fp8 cache": 3e-2}
"""A card rounds to the nearest e4m3 as the reference does; the products' order is another."""


def shapes(sizes: Sizes) -> Iterator[tuple[torch.dtype, KVCacheShape]]:
    """Every dtype with every head dimension; block sizes and groups take turns, as each shape is compiled anew."""
    blocks_and_groups = itertools.cycle(itertools.product(sizes.block_sizes, sizes.groups))
    for head_dim, (dtype, cache_dtype) in itertools.product(
        sizes.head_dims, [(each, each) for each in BOUNDS] + [(torch.bfloat16, FP8)]
    ):
        block_size, group = next(blocks_and_groups)
        yield dtype, KVCacheShape(*group, head_dim, (None, 100), block_size, cache_dtype)


def agreement(stand: Stand) -> Findings:
    """The greatest relative error of each dtype, over head dimensions, block sizes, groups, windows and lengths."""
    worst: dict[str, float] = {}
    there = list(shapes(stand.sizes))
    for (dtype, shape), spans in itertools.product(there, stand.sizes.spans):
        error = relative_error(Case(shape, dtype, spans), TritonAttention, stand.card.device)
        name = "fp8 cache" if shape.dtype == FP8 else str(dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), error if error == error else float("inf"))  # noqa: PLR0124 - NaN
    return Findings(
        rows=[{"part": "agreement", "dtype": name, "relative error": error} for name, error in worst.items()],
        checks=[
            Check(f"attention differs from torch's, {name} (relative)", f"<= {_BOUNDS[name]}", error)
            for name, error in worst.items()
        ]
        + [_layer_ops(dtype, stand) for dtype in BOUNDS],
        notes=[
            f"{len(there)} shapes of attention were compared with torch, caches poisoned with NaN, tables fragmented"
        ],
    )


def _layer_ops(dtype: torch.dtype, stand: Stand) -> Check:
    ours, theirs, device = TritonLayerOps(), TorchLayerOps(), stand.card.device
    hidden_size, worst = stand.sizes.config["hidden_size"], 0.0
    for rows, size in ((1, hidden_size), (33, hidden_size), (7, 896)):
        hidden, delta = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
        weight = torch.rand(size, device=device).to(dtype)
        gate_up = torch.randn(rows, 2 * size, device=device).to(dtype)
        pairs = (
            (ours.add_norm(hidden.clone(), delta, weight, 1e-5), theirs.add_norm(hidden.clone(), delta, weight, 1e-5)),
            (ours.silu_mul(gate_up), theirs.silu_mul(gate_up)),
        )
        for mine, other in pairs:
            worst = max(worst, float((mine.float() - other.float()).norm() / other.float().norm()))
    return Check(f"norms and activations differ from torch's, {dtype} (relative)", f"<= {BOUNDS[dtype]}", worst)


def speed(stand: Stand) -> Findings:
    """Paged decode in bytes, prefill in FLOPs, at the model's shape: shares of the card's ceilings."""
    found = Findings()
    for cache_dtype, batch in itertools.product((stand.sizes.dtype, FP8), stand.sizes.kernel_batches):
        found.rows.append(_decode(stand, cache_dtype, batch))
    for num_tokens, length in stand.sizes.prompts:
        found.rows.append(_prefill(stand, num_tokens, length))
    return found


def _decode(stand: Stand, cache_dtype: torch.dtype, batch: int) -> dict[str, Any]:
    """Of as many layers, one after the other, as it takes that the card's cache has forgotten the first."""
    sizes, context = stand.sizes, stand.sizes.context
    blocks_each = -(-context // _BLOCK_SIZE)
    layer = KVCacheShape(*sizes.heads, (None,), _BLOCK_SIZE, cache_dtype)
    read = batch * blocks_each * layer.bytes_per_block
    shape = replace(layer, windows=(None,) * max(1, -(-sizes.cold_bytes // read)))
    tables = (1 + torch.randperm(batch * blocks_each)).view(batch, blocks_each).tolist()
    slices = [SequenceSlice(context - 1, 1, table) for table in tables]
    taken_s = _seconds_a_layer(stand, shape, 1 + batch * blocks_each, slices)
    return {
        "part": "paged decode", "cache": str(cache_dtype), "batch": batch, "context": context,
        "us": taken_s * 1e6, "share of copy bandwidth": read / taken_s / stand.ceilings.copy_bytes_per_s,
    }  # fmt: skip


def _prefill(stand: Stand, num_tokens: int, length: int) -> dict[str, Any]:
    heads, _, head_dim = stand.sizes.heads
    shape = KVCacheShape(*stand.sizes.heads, (None,), _BLOCK_SIZE, stand.sizes.dtype)
    count, blocks_each = num_tokens // length, -(-length // _BLOCK_SIZE)
    slices = [
        SequenceSlice(0, length, range(1 + place * blocks_each, 1 + (place + 1) * blocks_each))
        for place in range(count)
    ]
    taken_s = _seconds_a_layer(stand, shape, 1 + count * blocks_each, slices)
    flops = count * 4 * heads * head_dim * length * (length + 1) / 2
    return {
        "part": "prefill attention", "tokens": num_tokens, "prompt": length,
        "us": taken_s * 1e6, "share of matmul rate": flops / taken_s / stand.ceilings.matmul_flops,
    }  # fmt: skip


def _seconds_a_layer(stand: Stand, shape: KVCacheShape, num_blocks: int, slices: list[SequenceSlice]) -> float:
    """That storing and attending take of the card."""
    backend = TritonAttention(shape, num_blocks, stand.card.device)
    for cache in backend.caches:
        cache.zero_()
    step, num_tokens = backend.prepare(slices), sum(part.num_tokens for part in slices)
    width = shape.num_heads + 2 * shape.num_kv_heads
    fused = torch.randn(num_tokens, width, shape.head_dim, dtype=stand.sizes.dtype, device=stand.card.device)

    def layers() -> None:
        for layer in range(len(shape.windows)):
            step(layer, fused[:, : shape.num_heads], fused[:, shape.num_heads :])

    return stand.card.alone_s(layers) / len(shape.windows)
