"""Which scheduler the engine runs, made from its settings."""

from __future__ import annotations

from llmservice_server.engine.batch_scheduler import BatchConfig, BatchScheduler
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.lane import LaneConfig
from llmservice_server.engine.plan import Scheduler
from llmservice_server.engine.scheduler import ContinuousScheduler, SchedulerConfig
from llmservice_server.engine.swap_space import SwapSpace

_MAX_WAIT_S = {"dynamic": 0.05, "static": 10.0}


_CPU_PREFILL_TOKENS = 512
"""Of a step. A CPU's matrix products are at their best from about 128 rows on, so that a longer step computes no faster
and everybody waits longer for its end; a GPU needs several times as many. With half of it, chunks cost a tenth of the
throughput of a small model, whose steps are mostly overhead; with this 3 % (`benchmarks/strategies.py`)."""


def make_scheduler(
    config: EngineConfig, max_num_seqs: int, pool: BlockPool, swap: SwapSpace | None, *, on_cpu: bool
) -> Scheduler:
    if config.scheduler == "continuous":
        return ContinuousScheduler(pool, continuous_config(config, max_num_seqs, on_cpu=on_cpu), swap)
    wait_s = config.max_batch_wait_s
    return BatchScheduler(
        pool,
        BatchConfig(
            block_size=config.block_size,
            batch_size=max_num_seqs,
            max_wait_s=_MAX_WAIT_S[config.scheduler] if wait_s is None else wait_s,
            padded=config.scheduler == "static",
            max_num_batched_tokens=config.max_num_batched_tokens,
        ),
    )


def continuous_config(config: EngineConfig, max_num_seqs: int, *, on_cpu: bool) -> SchedulerConfig:
    """A step has room for a token of every sequence and for `max_prefill_tokens` more; a chunk takes half of these at
    most, so that a long prompt never holds up all the others."""
    prefill_tokens = config.max_prefill_tokens or (_CPU_PREFILL_TOKENS if on_cpu else config.max_num_batched_tokens)
    return SchedulerConfig(
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=min(config.max_num_batched_tokens, max_num_seqs + prefill_tokens),
        prefill_chunk_tokens=min(config.prefill_chunk_tokens, max(1, prefill_tokens // 2)),
        long_prefill_tokens=config.long_prefill_tokens,
        prefix_caching=config.prefix_caching,
        interactive=LaneConfig(policy=config.interactive_policy),
        batch=LaneConfig(share=config.batch_share, policy=config.batch_policy),
    )
