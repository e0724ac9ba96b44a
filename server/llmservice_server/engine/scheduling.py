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


def make_scheduler(config: EngineConfig, max_num_seqs: int, pool: BlockPool, swap: SwapSpace | None) -> Scheduler:
    if config.scheduler == "continuous":
        return ContinuousScheduler(pool, _continuous(config, max_num_seqs), swap)
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


def _continuous(config: EngineConfig, max_num_seqs: int) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        long_prefill_tokens=config.long_prefill_tokens,
        prefix_caching=config.prefix_caching,
        interactive=LaneConfig(policy=config.interactive_policy),
        batch=LaneConfig(share=config.batch_share, policy=config.batch_policy),
    )
