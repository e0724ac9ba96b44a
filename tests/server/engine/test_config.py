from pathlib import Path
from typing import Any

import pytest

from llmservice_server.engine.config import EngineConfig
from llmservice_server.types.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', expected one of auto, bfloat16"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, expected at least 1"),
        ({"prefill_chunk_tokens": -3}, "prefill_chunk_tokens is -3"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"block_size": 24}, "block_size is 24, expected a power of two up to 256"),
        ({"block_size": 512}, "block_size is 512"),
        ({"scheduler": "lottery"}, "scheduler is 'lottery', expected one of continuous, dynamic, static"),
        ({"batch_order": "lifo"}, "batch_order is 'lifo'"),
        ({"batch_share": 1.0}, "batch_share is 1.0, expected 0"),
        ({"swap_space_gib": -1.0}, "swap_space_gib is -1.0"),
        ({"max_batch_wait_s": 1.0}, "continuous never waits"),
        ({"swap_space_gib": 1.0, "scheduler": "static"}, "static never preempts"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization is 1.1"),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 256}, "raise the first to 300 or lower the second"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model=Path("somewhere"), **settings)
