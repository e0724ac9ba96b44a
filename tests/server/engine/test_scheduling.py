"""From the engine's settings to the scheduler's."""

from pathlib import Path
from typing import Any

import pytest

from llmservice_bench.batch_scheduler import BatchScheduler
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.scheduler import continuous_config, make_scheduler


@pytest.mark.parametrize(
    ("settings", "on_cpu", "step", "chunk"),
    [
        ({}, False, 2048, 512),  # a GPU needs many rows to be at its best
        ({}, True, 32 + 512, 256),  # a CPU does not, and a long step is a long wait
        ({"max_prefill_tokens": 64}, True, 32 + 64, 32),
        ({"max_prefill_tokens": 64}, False, 32 + 64, 32),
        ({"max_prefill_tokens": 4096}, True, 2048, 512),
        ({"max_num_batched_tokens": 64, "prefill_chunk_tokens": 7}, True, 64, 7),  # both are bounds
        ({"max_prefill_tokens": 1}, True, 33, 1),
    ],
)
def test_step_has_room_for_every_sequence_and_some_prompt_tokens(
    settings: dict[str, Any], on_cpu: bool, step: int, chunk: int
) -> None:
    config = continuous_config(EngineConfig(model=Path("model"), **settings), 32, 512 if on_cpu else None)
    assert (config.max_num_batched_tokens, config.prefill_chunk_tokens) == (step, chunk)


def test_long_prompt_leaves_room_for_others_on_a_cpu() -> None:
    config = continuous_config(EngineConfig(model=Path("model")), 32, 512)
    assert config.max_long_tokens < config.max_num_batched_tokens - config.max_num_seqs


@pytest.mark.parametrize(("name", "padded"), [("static", True), ("dynamic", False)])
def test_request_level_batching_takes_its_whole_budget_on_any_device(name: Any, padded: bool) -> None:
    config = EngineConfig(model=Path("model"), scheduler=name)
    scheduler = make_scheduler(config, 32, BlockPool(10), None, 512)
    assert isinstance(scheduler, BatchScheduler)
    assert (scheduler.config.max_num_batched_tokens, scheduler.config.padded) == (2048, padded)
