"""Plans the sizing of a service: KV blocks and the number of sequences from the model's shape and the memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmservice_planner.budget import Budget
from llmservice_planner.explanation import explain
from llmservice_planner.overhead import OverheadTerm
from llmservice_planner.remedies import find_remedies
from llmservice_planner.sizing_request import MAX_NUM_SEQS_CAP, LimitedBy, Policy, SizingError, SizingRequest

__all__ = ["LimitedBy", "Plan", "Policy", "SizingError", "SizingRequest", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizing of a service. Sizes in bytes are totals over all GPUs."""

    fits: bool
    max_num_seqs: int
    """0 if the model does not fit."""
    max_model_len: int
    limited_by: LimitedBy
    weights_bytes: int
    kv_bytes_per_token: int
    overhead_bytes: int
    overhead: tuple[OverheadTerm, ...]
    kv_pool_bytes: int
    block_size: int
    num_blocks: int
    """Including the null block, which holds no token."""
    blocks_per_sequence: int
    """The blocks that the policy reserves for one sequence."""
    sequence_bytes: int
    """KV cache of one sequence of `max_model_len` tokens."""
    shortfall_bytes: int
    """The missing memory if the model does not fit, else 0."""
    decode_step_s: float | None
    """Time of a step with `max_num_seqs` sequences; None if it does not fit or the rates are unknown."""
    ridge_tokens: int | None
    itl_feasible: bool | None
    """Whether a single sequence keeps the promised inter-token latency; None without a promise or rates."""
    explanation: tuple[str, ...]
    """The lines of the explanation, each `label: text`."""
    remedies: tuple[str, ...]
    """Changes that would make it fit."""

    def to_dict(self) -> dict[str, Any]:
        """The output of `llmservice plan -o json`."""
        return {
            "fits": self.fits,
            "max_num_seqs": self.max_num_seqs,
            "limited_by": self.limited_by,
            "max_model_len": self.max_model_len,
            "weights_bytes": self.weights_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "overhead_bytes": self.overhead_bytes,
            "overhead": {term.name: term.total_bytes for term in self.overhead},
            "kv_pool_bytes": self.kv_pool_bytes,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "blocks_per_sequence": self.blocks_per_sequence,
            "sequence_bytes": self.sequence_bytes,
            "shortfall_bytes": self.shortfall_bytes,
            "decode_step_seconds": self.decode_step_s,
            "ridge_tokens": self.ridge_tokens,
            "itl_feasible": self.itl_feasible,
            "explanation": list(self.explanation),
            "remedies": list(self.remedies),
        }


def plan(request: SizingRequest) -> Plan:
    """Size one service; a pure function of the request."""
    budget = Budget.of(request)
    bounds = _bounds(budget)
    limited_by = _limiting(budget, bounds)
    max_num_seqs = bounds[limited_by] if budget.fits else 0
    rows = OverheadTerm(f"logits of {max_num_seqs} sequences", max_num_seqs * budget.row_bytes)
    overhead = (*budget.fixed_overhead, rows) if rows.total_bytes else budget.fixed_overhead
    pool_bytes = budget.pool_bytes(max_num_seqs)
    roofline = budget.roofline
    return Plan(
        fits=budget.fits,
        max_num_seqs=max_num_seqs,
        max_model_len=request.model_len,
        limited_by=limited_by,
        weights_bytes=budget.weights_bytes,
        kv_bytes_per_token=budget.kv_bytes_per_token,
        overhead_bytes=sum(term.total_bytes for term in overhead),
        overhead=overhead,
        kv_pool_bytes=pool_bytes,
        block_size=request.block_size,
        num_blocks=pool_bytes // budget.block_bytes,
        blocks_per_sequence=budget.sequence_blocks(request.tokens_per_sequence),
        sequence_bytes=budget.sequence_blocks(request.model_len) * budget.block_bytes,
        shortfall_bytes=budget.shortfall_bytes,
        decode_step_s=roofline.decode_step_s(max_num_seqs, request.tokens_per_sequence)
        if roofline and max_num_seqs
        else None,
        ridge_tokens=roofline.ridge_tokens if roofline else None,
        itl_feasible=_itl_feasible(budget),
        explanation=explain(budget, overhead, max_num_seqs, bounds, limited_by),
        remedies=() if budget.fits else find_remedies(request),
    )


def _bounds(budget: Budget) -> Mapping[LimitedBy, int]:
    """The bounds on the number of sequences, without those that need unknown rates."""
    request, roofline = budget.request, budget.roofline
    bounds: dict[LimitedBy, int] = {
        "kvMemory": budget.sequences(request.tokens_per_sequence),
        "tokenBudget": request.max_num_batched_tokens,
        "cap": MAX_NUM_SEQS_CAP,
    }
    if request.max_num_seqs is not None:
        bounds["maxNumSeqs"] = request.max_num_seqs
    if roofline is not None:
        bounds["ridge"] = roofline.ridge_tokens
        if request.itl_p99_s is not None:
            bounds["itlPromise"] = _itl_bound(budget, request.itl_p99_s)
    return bounds


def _limiting(budget: Budget, bounds: Mapping[LimitedBy, int]) -> LimitedBy:
    """The bound that applies: the user's number if given (preemption frees memory), else the smallest."""
    if not budget.fits:
        return "kvMemory"
    return "maxNumSeqs" if "maxNumSeqs" in bounds else min(bounds, key=lambda name: bounds[name])


def _itl_bound(budget: Budget, itl_s: float) -> int:
    """The largest number of sequences whose decode step keeps the promise, at least 1."""
    roofline = budget.roofline
    if roofline is None:
        return MAX_NUM_SEQS_CAP
    tokens = budget.request.tokens_per_sequence
    sizes = range(1, MAX_NUM_SEQS_CAP + 1)
    return max(1, bisect_right(sizes, itl_s, key=lambda size: roofline.decode_step_s(size, tokens)))


def _itl_feasible(budget: Budget) -> bool | None:
    roofline, promise = budget.roofline, budget.request.itl_p99_s
    if roofline is None or promise is None:
        return None
    return roofline.decode_step_s(1, budget.request.tokens_per_sequence) <= promise
