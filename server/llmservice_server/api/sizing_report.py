"""What a server tells of its size at GET /sizing."""

from __future__ import annotations

import msgspec


class SizingReport(msgspec.Struct, kw_only=True, frozen=True):
    """The numbers that the engine runs with, and the figures that they were worked out from."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int  # usable ones: the null block apart
    memory_bytes: dict[str, int]  # by kind: weights, kv_cache, activations, graphs, total
    shape: dict[str, int | str | bool] | None  # as `spec.model.shape` of an LLMService; None: a family unknown to it
