from pathlib import Path

import pytest

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.overhead import PROCESS_BYTES
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.interfaces import KVCachePlan
from llmservice_server.runtime.memory import most_sequences, plan_kv_cache, usable_bytes
from llmservice_server.types.errors import OutOfMemoryError

GIB = 1 << 30
GROUPS = BlockGroups(16, num_layers=1)


def plan(pool_bytes: int, max_model_len: int = 64, may_shorten: bool = False) -> KVCachePlan:
    return plan_kv_cache(
        pool_bytes,
        bytes_per_block=100,
        groups=GROUPS,
        max_model_len=max_model_len,
        may_shorten=may_shorten,
    )


@pytest.mark.parametrize(
    ("pool_bytes", "expected"),
    [
        (500, KVCachePlan(5, 64, GROUPS)),  # the null block and four: exactly one request
        (599, KVCachePlan(5, 64, GROUPS)),
        (10_000, KVCachePlan(100, 64, GROUPS)),
    ],
)
def test_the_pool_is_divided_into_blocks_that_hold_one_request_at_least(pool_bytes: int, expected: KVCachePlan) -> None:
    assert plan(pool_bytes) == expected
    assert expected.num_usable_blocks * 16 >= expected.max_model_len


def test_one_block_too_few_is_refused_with_need_have_and_the_longest_that_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"max_model_len 65 needs 600 bytes .* lower it to 64 or give"):
        plan(599, max_model_len=65)


def test_a_length_from_the_model_is_lowered_to_what_fits() -> None:
    assert plan(599, max_model_len=4096, may_shorten=True) == KVCachePlan(5, 64, GROUPS)


@pytest.mark.parametrize("pool_bytes", [-10, 0, 199])
def test_no_room_for_a_single_block_is_refused_even_where_the_length_may_be_lowered(pool_bytes: int) -> None:
    with pytest.raises(OutOfMemoryError, match="room for no block at all"):
        plan(pool_bytes, may_shorten=True)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "most", "sequences"),
    [
        (1 + 960, 8192, 256, 120),
        (1 + 959, 8192, 256, 119),
        (1 + 960, 64, 256, 240),  # none can be longer than 64
        (1 + 100_000, 8192, 256, 256),
        (1 + 100_000, 8192, 64, 64),
        (1 + 7, 112, 256, 1),
    ],
)
def test_without_a_number_of_their_own_as_many_short_sequences_run_as_the_pool_holds(
    num_blocks: int, max_model_len: int, most: int, sequences: int
) -> None:
    assert most_sequences(KVCachePlan(num_blocks, max_model_len, GROUPS), most) == sequences


@pytest.mark.parametrize(
    ("limit", "shares_memory", "expected"),
    [
        (None, True, (8 * GIB, 0)),
        (4 * GIB, True, (4 * GIB, PROCESS_BYTES)),
        (64 * GIB, True, (8 * GIB + PROCESS_BYTES, PROCESS_BYTES)),
        (4 * GIB, False, (4 * GIB, 0)),  # a GPU, whose memory holds no processes
        (64 * GIB, False, (8 * GIB, 0)),
    ],
)
def test_the_limit_of_the_pod_bounds_what_is_available(
    limit: int | None, shares_memory: bool, expected: tuple[int, int]
) -> None:
    config = EngineConfig(model=Path("m"), memory_limit_bytes=limit)
    assert usable_bytes(config, 8 * GIB, shares_memory=shares_memory) == expected
