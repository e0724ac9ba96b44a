"""Our prefill kernel against torch's `varlen_attn`, on the GPU and the model's own shape, when the engine starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from llmservice_server.backend.agreement import MIXED, Case
from llmservice_server.backend.base import KVCacheShape, StepInput
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.probe import what_is_wrong
from llmservice_server.backend.cuda.varlen import Varlen, VarlenFunction, by_torch, why_varlen_cannot_serve

_GAIN = 0.05  # of the time: what a change of ways must save, as two measurements of one way differ by less


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way."""

    name: str
    why_unusable: Callable[[], str | None]  # a phrase that says what is wrong; None where nothing is
    seconds: Callable[[], float]  # that the work takes; asked only where it is usable


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    reason: str  # every candidate's time, or why it has none


def race(candidates: Sequence[Candidate]) -> Verdict:
    """The first of the candidates unless another is faster by a twentieth; of several such ones the fastest."""
    times: dict[str, float] = {}
    said = []
    for candidate in candidates:
        problem, taken_s = _timed(candidate)
        if problem is not None:
            said.append(f"{candidate.name} is unusable: {problem}")
        else:
            times[candidate.name] = taken_s
            said.append(f"{candidate.name} {taken_s * 1e3:.3g} ms")
    first = candidates[0].name
    if first in times:
        times[first] *= 1 - _GAIN
    winner = min(times, key=lambda name: times[name], default=first)
    return Verdict(winner, ", ".join(said))


def _timed(candidate: Candidate) -> tuple[str | None, float]:
    """What is wrong with it, or what it takes."""
    try:
        problem = candidate.why_unusable()
        return problem, candidate.seconds() if problem is None else 0.0
    except Exception as error:  # of a compiler, a driver or a GPU: another candidate serves
        return f"{type(error).__name__}: {error}".splitlines()[0], 0.0


OURS, TORCHS = "triton", "varlen_attn"
_MOST_TOKENS = 2048  # of the chunk that they race on: a millisecond or less
_WARM_UPS, _REPETITIONS = 2, 5


def race_for_chunks(
    shape: KVCacheShape,
    dtype: torch.dtype,
    device: torch.device,
    max_num_batched_tokens: int,
    attend: VarlenFunction = by_torch,
) -> Verdict:
    """On a chunk that follows as many cached tokens as it has. Takes a few milliseconds and frees what it took."""
    count = max(2, min(_MOST_TOKENS, max_num_batched_tokens) // 2)

    def candidate(name: str, varlen: Varlen | None, why_unusable: Callable[[], str | None]) -> Candidate:
        one_layer = replace(shape, windows=shape.windows[:1])
        return Candidate(name, why_unusable, lambda: _seconds(one_layer, dtype, device, count, varlen))

    return race(
        [
            candidate(OURS, None, lambda: None),  # probed before
            candidate(
                TORCHS,
                Varlen(attend, max_num_batched_tokens),
                lambda: _why_varlen_is_unusable(shape, dtype, device, attend),
            ),
        ]
    )


def _why_varlen_is_unusable(
    shape: KVCacheShape, dtype: torch.dtype, device: torch.device, attend: VarlenFunction
) -> str | None:
    problem = why_varlen_cannot_serve(shape, dtype)
    if problem is not None:
        return problem
    varlen = Varlen(attend, most_keys=sum(map(sum, MIXED)))
    case = Case(replace(shape, windows=tuple({*shape.windows})), dtype, MIXED)

    def backend(shape: KVCacheShape, num_blocks: int, device: torch.device) -> TritonAttention:
        return TritonAttention(shape, num_blocks, device, varlen)

    return what_is_wrong([case], backend, device)


def _seconds(shape: KVCacheShape, dtype: torch.dtype, device: torch.device, count: int, varlen: Varlen | None) -> float:
    """The median time of one layer's attention, the host's share in it included."""
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
