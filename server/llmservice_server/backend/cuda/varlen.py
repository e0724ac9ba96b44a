"""Chunks of prompts by torch's `varlen_attn` (FlashAttention), and the choice between it and our kernel.

Torch's CUDA builds include FlashAttention 2, for which torch refuses block tables or computes wrong results
(pytorch/pytorch#175924, #194167): they need FlashAttention 3, which is installed separately. So the blocks are first
gathered to contiguous rows, in one indexed copy per layer.

Bytes: the copy reads and writes `2 * num_kv_heads * head_dim * itemsize` for each token of the chunks' sequences, from
their first to the chunk's last; the kernel then reads them as ours does. FLOPs: as `kernels/paged_prefill.py`.

Decodes are computed by our kernel: it reads each key once, so a copy would double the time, and CUDA graphs need shapes
that do not depend on lengths. So are fp8 caches, and float32, which FlashAttention does not support.

At start-up `choose_chunk_attention` times both on the GPU, with the model's own shape.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from llmservice_server.backend.agreement import MIXED, Case, why_wrong
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.attention import StepTables, TritonAttention
from llmservice_server.backend.step_input import Int32Array, StepInput, firsts_of, positions_of
from llmservice_server.backend.transfer import tables_to_device
from llmservice_server.types.errors import first_line

_DTYPES = (torch.bfloat16, torch.float16)
OURS, TORCH_VARLEN = "triton", "varlen_attn"
_MAX_TOKENS = 2048  # of the chunk that is timed: a millisecond or less
_WARM_UPS, _REPETITIONS = 2, 5
_MIN_GAIN = 0.05  # of the time: two measurements of one candidate differ by less


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of concatenated sequences."""

    queries: torch.Tensor  # int32 [num_seqs + 1], the last one's end included
    keys: torch.Tensor  # likewise
    max_queries: int  # of a sequence
    max_keys: int


VarlenFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Bounds, int | None], torch.Tensor]
"""Takes queries `[num_queries, num_heads, head_dim]`, keys and values `[num_keys, num_kv_heads, head_dim]`, bounds and
window; returns a tensor like the queries. Causal; the last query of a sequence sees its last key."""


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, window: int | None
) -> torch.Tensor:
    """A `VarlenFunction`."""
    from torch.nn.attention.varlen import varlen_attn

    has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 always accepts grouped heads
    grouped: dict[str, Any] = {"enable_gqa": True} if has_option else {}
    attended = varlen_attn(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        bounds.max_queries,
        bounds.max_keys,
        window_size=(-1 if window is None else window - 1, 0),  # keys to the left and the right of the query's own
        **grouped,
    )
    return cast("torch.Tensor", attended)  # a tuple only if auxiliary results are requested


@dataclass(frozen=True, slots=True)
class VarlenChunks:
    """The chunks of a step, on the device."""

    attend: VarlenFunction
    bounds: Bounds
    query_rows: torch.Tensor  # int64 [num_queries], of the step's tokens
    rows: torch.Tensor  # int32 [2 * num_keys * num_kv_heads]: keys before values, the heads of a token adjacent
    """In the cache viewed as rows of head_dim."""

    @classmethod
    def of(cls, attend: VarlenFunction, tables: StepTables, shape: KVCacheShape, device: torch.device) -> VarlenChunks:
        """The step has at least one chunk."""
        first_rows, starts, counts = tables.chunks.astype(np.int64).T
        lengths = starts + counts
        sequence, position = positions_of(np.zeros_like(lengths), lengths)
        blocks = tables.blocks[tables.chunk_firsts[sequence] + position // shape.block_size].astype(np.int64)
        key_rows = blocks * (shape.num_kv_heads * 2 * shape.block_size) + position % shape.block_size
        query_rows = positions_of(first_rows, counts)[1]
        query_bounds, key_bounds, query_rows_there, key_rows_there = tables_to_device(
            [_bounds(counts), _bounds(lengths), query_rows.astype(np.int32), key_rows.astype(np.int32)], device
        )
        kinds = torch.arange(2, dtype=torch.int32, device=device) * shape.block_size
        heads = torch.arange(shape.num_kv_heads, dtype=torch.int32, device=device) * 2 * shape.block_size
        rows = key_rows_there[None, :, None] + kinds[:, None, None] + heads
        bounds = Bounds(query_bounds, key_bounds, int(counts.max()), int(lengths.max()))
        return cls(attend, bounds, query_rows_there.long(), rows.flatten())

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        scales: torch.Tensor | None,
        output: torch.Tensor,
        window: int | None,
        *,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Implements `ChunkAttention`; never with `scales`, a `softcap` or `sinks`."""
        num_kv_heads, head_dim = cache.shape[1], cache.shape[-1]
        gathered = cache.view(-1, head_dim).index_select(0, self.rows)
        key, value = gathered.view(2, -1, num_kv_heads, head_dim).unbind()
        attended = self.attend(query.index_select(0, self.query_rows), key, value, self.bounds, window)
        output.index_copy_(0, self.query_rows, attended.flatten(1))


@dataclass(frozen=True, slots=True)
class Varlen:
    """The steps whose chunks `attend` computes."""

    attend: VarlenFunction
    max_keys: int  # of a step: the profiling step must have allocated as much memory for the copy

    def chunks(self, tables: StepTables, shape: KVCacheShape, device: torch.device) -> VarlenChunks | None:
        """None if the step has more keys, or no chunk."""
        num_keys = int(tables.chunks[:, 1:].sum())
        if not 0 < num_keys <= self.max_keys:
            return None
        return VarlenChunks.of(self.attend, tables, shape, device)


def why_varlen_cannot_serve(shape: KVCacheShape, dtype: torch.dtype) -> str | None:
    """What rules it out before anything is run, as a phrase; None if nothing does."""
    if shape.dtype.itemsize == 1:
        return "an fp8 cache is supported by our kernels only"
    if shape.is_latent:
        return "latents are supported by our kernels only"
    if not shape.is_plain:
        return "bounds of scores (softcap) and attention sinks are supported by our kernels only"
    if dtype not in _DTYPES or shape.dtype != dtype:
        return f"it takes bfloat16 and float16, and keys of the queries' dtype, not {dtype} with {shape.dtype}"
    return None


def _bounds(counts: np.typing.NDArray[np.int64]) -> Int32Array:
    return np.append(firsts_of(counts), counts.sum()).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str  # the time of each, or why it is unusable


def fastest(times: Mapping[str, float]) -> str:
    """Ours, unless torch's is faster by a twentieth. times: of those that are usable."""
    return min(times, key=lambda name: times[name] * (1 - _MIN_GAIN if name == OURS else 1), default=OURS)


def choose_chunk_attention(
    shape: KVCacheShape,
    dtype: torch.dtype,
    device: torch.device,
    max_num_batched_tokens: int,
    attend: VarlenFunction = by_torch,
) -> Choice:
    """Time our kernel and `attend` on a chunk after as many cached tokens. Takes milliseconds and frees its memory."""
    count = max(2, min(_MAX_TOKENS, max_num_batched_tokens) // 2)
    one_layer = replace(shape, windows=shape.windows[:1])
    times: dict[str, float] = {}
    reasons = []
    for name, varlen in ((OURS, None), (TORCH_VARLEN, Varlen(attend, max_num_batched_tokens))):
        try:  # ours was checked before
            problem = None if varlen is None else _why_varlen_is_unusable(shape, dtype, device, attend)
            if problem is None:
                times[name] = _seconds(one_layer, dtype, device, count, varlen)
        except Exception as error:  # of a compiler, a driver or a GPU: the other is used
            problem = first_line(error)
        reasons.append(f"{name} {times[name] * 1e3:.3g} ms" if problem is None else f"{name} is unusable: {problem}")
    return Choice(fastest(times), ", ".join(reasons))


def _why_varlen_is_unusable(
    shape: KVCacheShape, dtype: torch.dtype, device: torch.device, attend: VarlenFunction
) -> str | None:
    problem = why_varlen_cannot_serve(shape, dtype)
    if problem is not None:
        return problem
    varlen = Varlen(attend, max_keys=sum(map(sum, MIXED)))
    case = Case(replace(shape, windows=tuple({*shape.windows})), dtype, MIXED)

    def backend(shape: KVCacheShape, num_blocks: int, device: torch.device) -> TritonAttention:
        return TritonAttention(shape, num_blocks, device, varlen)

    return why_wrong([case], backend, device)


def _seconds(shape: KVCacheShape, dtype: torch.dtype, device: torch.device, count: int, varlen: Varlen | None) -> float:
    """The median time of one layer's attention, including the host's."""
    num_blocks = -(-2 * count // shape.block_size)
    backend = TritonAttention(shape, 1 + num_blocks, device, varlen)
    for cache in backend.caches:
        cache.zero_()
    step = backend.prepare(StepInput.of([(count, count, range(1, 1 + num_blocks))]))
    heads = torch.randn(count, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    times = [
        _elapsed_s(lambda: step(0, heads[:, : shape.num_heads], heads[:, shape.num_heads :]), device)
        for _ in range(_WARM_UPS + _REPETITIONS)
    ]
    return statistics.median(times[_WARM_UPS:])


def _elapsed_s(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
