"""What a server that sized itself tells at GET /sizing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmservice_operator.api.status import SizingStatus
from llmservice_planner.shape import ModelShape

SERVER = "server"
"""What limited a number that the server worked out by itself."""

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class SizingReport:
    """The numbers that a server runs with."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """Usable ones, the null block apart."""
    weights_bytes: int
    kv_cache_bytes: int
    activations_bytes: int
    """Those of CUDA graphs among them."""
    shape: ModelShape | None
    """None: a model whose figures the planner does not understand."""


def parse_report(text: bytes) -> SizingReport:
    """Raises ValueError where this is no server's answer."""
    try:
        told: dict[str, Any] = json.loads(text)
        memory = told["memory_bytes"]
        return SizingReport(
            max_num_seqs=int(told["max_num_seqs"]),
            max_model_len=int(told["max_model_len"]),
            block_size=int(told["block_size"]),
            num_blocks=int(told["num_blocks"]),
            weights_bytes=int(memory["weights"]),
            kv_cache_bytes=int(memory["kv_cache"]),
            activations_bytes=int(memory["activations"]) + int(memory.get("graphs", 0)),
            shape=ModelShape.from_fields(told["shape"]) if told.get("shape") else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no answer of llmservice serve: {type(error).__name__} {error}") from error


def reported_sizing(report: SizingReport) -> SizingStatus:
    """`status.sizing` where there is no prediction to stand beside: the server's figures are all there is."""
    tokens = max(1, (report.num_blocks + 1) * report.block_size)
    return SizingStatus(
        source="pod",
        max_num_seqs=report.max_num_seqs,
        max_model_len=report.max_model_len,
        kv_bytes_per_token=report.kv_cache_bytes // tokens,
        weights_gib=round(report.weights_bytes / _GIB, 2),
        overhead_gib=round(report.activations_bytes / _GIB, 2),
        kv_pool_gib=round(report.kv_cache_bytes / _GIB, 2),
        blocks=report.num_blocks + 1,
        limited_by=SERVER,
        explanation="The server sized itself, for the model's figures could not be read before it ran, nor planned with"
        " after. These are the numbers that it found after loading.",
    )
