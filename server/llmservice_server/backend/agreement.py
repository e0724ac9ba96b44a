"""Comparison of a backend's attention with the torch backend's in float64, on random input.

Caches are filled with NaN, tables are fragmented and prompts, chunks and decodes are mixed, so that a wrong read or
write of the cache changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from llmservice_server.backend.base import Attention
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.quantized import FLOAT8_MAX
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.attention import TorchAttention
from llmservice_server.types.errors import first_line

BackendOf = Callable[[KVCacheShape, int, torch.device], Attention]

Spans = Sequence[tuple[int, int]]

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The largest relative error (Euclidean norm of all numbers) of activations of a dtype."""
_FP8_BOUND = 0.1  # the reference rounds to fp8 as torch does; a GPU and Triton's interpreter may round differently

MIXED: Spans = ((0, 37), (5, 1), (0, 1), (48, 19), (130, 1), (63, 1), (64, 2), (15, 1))
"""Prompts, later chunks (or chunks after a cached prefix) and decodes: (tokens before the step, tokens in it)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One step of a model."""

    shape: KVCacheShape  # its dtype is the cache's
    dtype: torch.dtype  # of the activations
    spans: Spans = MIXED


def relative_error(case: Case, backend_of: BackendOf, device: torch.device, seed: int = 0) -> float:
    """The largest of all layers; NaN if an output is NaN. Raises what the backend raises."""
    shape = case.shape
    generator = torch.Generator().manual_seed(seed)
    blocks_each = [-(-(start + count) // shape.block_size) for start, count in case.spans]
    num_blocks = 1 + sum(blocks_each)
    tables = _fragmented(blocks_each, generator)
    backend = _filled_with_nan(backend_of(shape, num_blocks, device))
    reference = _filled_with_nan(TorchAttention(replace(shape, dtype=torch.float64), num_blocks, device))
    worst = 0.0
    sinks = torch.randn(shape.num_heads, generator=generator).to(device) if shape.has_sinks else None
    for layer in range(len(shape.windows)):
        queries, key_values = _random(case, generator, device)
        output = _output(backend, layer, case, tables, queries, key_values, sinks)
        kept = [quantized(part) if shape.dtype.itemsize == 1 else part.to(shape.dtype) for part in key_values]
        exact = [part.double() for part in queries], [part.double() for part in kept]
        expected = _output(reference, layer, case, tables, *exact, None if sinks is None else sinks.double())
        error = float((output.double() - expected).norm() / expected.norm())
        worst = max(worst, error) if error == error else error  # noqa: PLR0124 - true for NaN only
    return worst


def why_wrong(cases: Sequence[Case], backend_of: BackendOf, device: torch.device) -> str | None:
    """What a backend raised on these cases, or its error if that is too large; None if it is correct."""
    for case in cases:
        try:
            error = relative_error(case, backend_of, device)
        except Exception as raised:  # of a compiler, a driver or a GPU: another backend is used
            return first_line(raised)
        bound = _FP8_BOUND if case.shape.dtype.itemsize == 1 else BOUNDS[case.dtype]
        if not error <= bound:
            return f"its output is off by {error:.2g}, at most {bound:.2g} is right for {case.dtype}"
    return None


def quantized(rows: torch.Tensor) -> torch.Tensor:
    """`rows` `[..., head_dim]` as an fp8 cache stores them (e4m3, and a scale for each row), in their own dtype."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / FLOAT8_MAX
    return ((rows.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)


def _fragmented(blocks_each: Sequence[int], generator: torch.Generator) -> list[list[int]]:
    """Tables of the blocks 1, 2, … in random order."""
    blocks = (1 + torch.randperm(sum(blocks_each), generator=generator)).tolist()
    tables = []
    for count in blocks_each:
        tables.append(blocks[:count])
        blocks = blocks[count:]
    return tables


def _filled_with_nan(backend: Attention) -> Attention:
    for cache in backend.caches:
        cache.copy_(torch.full((), torch.nan))
        cache[0].zero_()  # the null block, which may be read and masked
    return backend


def _random(
    case: Case, generator: torch.Generator, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries, and keys and values, of all tokens of each sequence."""
    shape = case.shape
    queries, key_values = [], []
    for start, count in case.spans:
        fused = torch.randn(
            start + count, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator
        ).to(device, case.dtype)
        queries.append(fused[:, : shape.num_heads])
        key_values.append(fused[:, shape.num_heads :])
    return queries, key_values


def _output(
    backend: Attention,
    layer: int,
    case: Case,
    tables: Sequence[Sequence[int]],
    queries: Sequence[torch.Tensor],
    key_values: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Store the tokens before the step in a step of their own, then compute the step.

    Blocks that the layer's window has left are the null block by then.
    """
    before = [place for place, (start, _) in enumerate(case.spans) if start]
    if before:
        backend.prepare(StepInput.of([(0, case.spans[place][0], tables[place]) for place in before]))(
            layer,
            torch.cat([queries[place][: case.spans[place][0]] for place in before]),
            torch.cat([key_values[place][: case.spans[place][0]] for place in before]),
            sinks,
        )
    first_seen = replace(case.shape, windows=(case.shape.windows[layer],)).block_groups(1).first_seen
    slid = [min(len(table), first_seen(0, start)) for (start, _), table in zip(case.spans, tables, strict=True)]
    seen = [[0] * count + list(table[count:]) for table, count in zip(tables, slid, strict=True)]
    runs = [(start, count, table) for (start, count), table in zip(case.spans, seen, strict=True)]
    return backend.prepare(StepInput.of(runs))(
        layer,
        torch.cat([part[start:] for part, (start, _) in zip(queries, case.spans, strict=True)]),
        torch.cat([part[start:] for part, (start, _) in zip(key_values, case.spans, strict=True)]),
        sinks,
    )
