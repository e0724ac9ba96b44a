"""Plans the sizing of a service: KV blocks and the number of sequences from the model's shape and the memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmservice_planner.model.encoders import ENCODER_BATCH
from llmservice_planner.sizing.budget import NULL_BLOCKS, Budget
from llmservice_planner.sizing.explanation import explain
from llmservice_planner.sizing.gpu import CPU
from llmservice_planner.sizing.overhead import OverheadTerm
from llmservice_planner.sizing.remedies import find_remedies
from llmservice_planner.sizing.request import (
    CAP_OF_CPU,
    CAP_OF_UNKNOWN_RATES,
    MAX_NUM_SEQS_CAP,
    LimitedBy,
    SizingError,
    SizingRequest,
)

__all__ = ["LimitedBy", "Plan", "SizingError", "SizingRequest", "max_num_seqs_with", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizing of a service. Sizes in bytes are totals over all GPUs."""

    fits: bool
    max_num_seqs: int
    """The largest batch that is worth it; the scheduler admits as many as the pool is predicted to hold. 0 if the model
    does not fit."""
    guaranteed_sequences: int
    """Sequences of `max_model_len` tokens that the pool holds: so many are never preempted."""
    expected_sequences: int
    """Typical sequences that the pool holds."""
    limited_by: LimitedBy
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    """Of a step, at most for one prompt while others wait."""
    max_model_len: int
    weights_bytes: int
    kv_bytes_per_token: int
    overhead_bytes: int
    overhead: tuple[OverheadTerm, ...]
    kv_pool_bytes: int
    block_size: int
    num_blocks: int
    """Including the null block, which holds no token."""
    sequence_bytes: int
    """KV cache of one sequence of `max_model_len` tokens."""
    shortfall_bytes: int
    """The missing memory if the model does not fit, else 0."""
    decode_step_s: float | None
    """Time of a step with `max_num_seqs` sequences; None if it does not fit or the rates are unknown."""
    ridge_tokens: int | None
    itl_feasible: bool | None
    """Whether a single sequence meets the inter-token latency target; None without a target or rates."""
    explanation: tuple[str, ...]
    """The lines of the explanation, each `label: text`."""
    remedies: tuple[str, ...]
    """Changes that would make it fit."""

    def to_dict(self) -> dict[str, Any]:
        """The output of `llmservice plan -o json`."""
        content = asdict(self) | {
            "overhead": {term.name: term.total_bytes for term in self.overhead},
            "explanation": list(self.explanation),
            "remedies": list(self.remedies),
        }
        return {"decode_step_seconds" if name == "decode_step_s" else name: value for name, value in content.items()}


def plan(request: SizingRequest) -> Plan:
    """Size one service; a pure function of the request."""
    budget = Budget.of(request)
    bounds = _bounds(budget)
    limited_by = _limiting(budget, bounds)
    max_num_seqs = bounds[limited_by] if budget.fits else 0
    rows = OverheadTerm(f"logits of {max_num_seqs} sequences", max_num_seqs * budget.row_bytes)
    overhead = (*budget.fixed_overhead, rows) if rows.total_bytes else budget.fixed_overhead
    pool_bytes = budget.pool_bytes(max_num_seqs)
    latency = budget.latency
    return Plan(
        fits=budget.fits,
        max_num_seqs=max_num_seqs,
        guaranteed_sequences=budget.sequences(request.model_len, max_num_seqs),
        expected_sequences=budget.sequences(request.typical_tokens, max_num_seqs),
        max_num_batched_tokens=budget.step.total,
        prefill_chunk_tokens=budget.step.chunk,
        max_model_len=request.model_len,
        limited_by=limited_by,
        weights_bytes=budget.weights_bytes,
        kv_bytes_per_token=budget.kv_bytes_per_token,
        overhead_bytes=sum(term.total_bytes for term in overhead),
        overhead=overhead,
        kv_pool_bytes=pool_bytes,
        block_size=request.block_size,
        num_blocks=pool_bytes // budget.block_bytes if budget.block_bytes else 0,
        sequence_bytes=budget.groups.blocks(request.model_len) * budget.block_bytes,
        shortfall_bytes=budget.shortfall_bytes,
        decode_step_s=budget.decode_step_s(max_num_seqs) if max_num_seqs else None,
        ridge_tokens=latency.ridge_tokens if latency else None,
        itl_feasible=_itl_feasible(budget),
        explanation=explain(budget, overhead, max_num_seqs, bounds, limited_by),
        remedies=() if budget.fits else tuple(find_remedies(request)),
    )


def max_num_seqs_with(request: SizingRequest, num_blocks: int, num_seqs: int) -> tuple[int, LimitedBy]:
    """What `plan` would choose with the usable KV blocks that a server measured, and why; 0 if the model would not fit.

    `num_seqs` is that server's maximum: their rows of logits are not in its pool. The answer hardly depends on it.
    """
    budget = Budget.of(request)
    surplus_bytes = (num_blocks + NULL_BLOCKS) * budget.block_bytes - budget.pool_bytes(num_seqs)
    measured = replace(budget, usable_bytes=budget.usable_bytes + surplus_bytes)
    bounds = _bounds(measured)
    limited_by = _limiting(measured, bounds)
    return (bounds[limited_by] if measured.fits else 0), limited_by


def _bounds(budget: Budget) -> Mapping[LimitedBy, int]:
    """The bounds on the number of sequences, without those that need unknown rates."""
    request, latency = budget.request, budget.latency
    if request.shape.is_encoder:
        return _encoder_bounds(budget)
    bounds: dict[LimitedBy, int] = {
        "kvMemory": budget.most_sequences,
        "tokenBudget": budget.step.total,
        "cap": MAX_NUM_SEQS_CAP if latency else _cap_without_rates(request),
    }
    if (rows := budget.worthwhile_rows) is not None:
        bounds["logits"] = rows
    if request.max_num_seqs is not None:
        bounds["maxNumSeqs"] = request.max_num_seqs
    if latency is not None and request.itl_p99_s is not None:
        bounds["itlTarget"] = _itl_bound(budget, request.itl_p99_s)
    elif latency is not None and latency.ridge_tokens is not None and request.bounded_by_ridge:
        bounds["ridge"] = latency.ridge_tokens
    return bounds


def _encoder_bounds(budget: Budget) -> Mapping[LimitedBy, int]:
    """The bounds on the inputs of a batch, which needs no memory but that of a step's activations."""
    given = budget.request.max_num_seqs
    bounds: dict[LimitedBy, int] = {"tokenBudget": budget.step.total, "cap": ENCODER_BATCH}
    return bounds if given is None else {**bounds, "maxNumSeqs": given}


def _cap_without_rates(request: SizingRequest) -> int:
    return CAP_OF_CPU if isinstance(request.device, CPU) else CAP_OF_UNKNOWN_RATES


def _limiting(budget: Budget, bounds: Mapping[LimitedBy, int]) -> LimitedBy:
    """The bound that applies: the user's number if given (preemption frees memory), else the smallest."""
    if not budget.fits:
        return "kvMemory"
    return "maxNumSeqs" if "maxNumSeqs" in bounds else min(bounds, key=lambda name: bounds[name])


def _itl_bound(budget: Budget, itl_s: float) -> int:
    """The largest number of sequences whose decode step meets the target, at least 1."""
    sizes = range(1, MAX_NUM_SEQS_CAP + 1)
    return max(1, bisect_right(sizes, itl_s, key=lambda size: budget.decode_step_s(size) or 0.0))


def _itl_feasible(budget: Budget) -> bool | None:
    alone_s, target_s = budget.decode_step_s(1), budget.request.itl_p99_s
    return None if alone_s is None or target_s is None else alone_s <= target_s
