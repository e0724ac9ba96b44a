import mmap
from pathlib import Path

import pytest

from llmservice_server.engine.errors import OutOfMemoryError
from llmservice_server.engine.memory import (
    KVCachePlan,
    available_cpu_bytes,
    peak_growth_bytes,
    plan_kv_cache,
    sequences_held,
)

GIB = 1 << 30


def plan(pool_bytes: int, max_model_len: int = 64, may_shorten: bool = False) -> KVCachePlan:
    return plan_kv_cache(
        pool_bytes,
        bytes_per_block=100,
        block_size=16,
        max_model_len=max_model_len,
        may_shorten=may_shorten,
    )


@pytest.mark.parametrize(
    ("pool_bytes", "expected"),
    [
        (500, KVCachePlan(5, 64)),  # the null block and four: exactly one request
        (599, KVCachePlan(5, 64)),
        (10_000, KVCachePlan(100, 64)),
    ],
)
def test_the_pool_is_divided_into_blocks_that_hold_one_request_at_least(pool_bytes: int, expected: KVCachePlan) -> None:
    assert plan(pool_bytes) == expected
    assert expected.num_usable_blocks * 16 >= expected.max_model_len


def test_one_block_too_few_is_refused_with_need_have_and_the_longest_that_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"max_model_len 65 needs 0.00 MiB .* lower it to 64 or give"):
        plan(599, max_model_len=65)


def test_a_length_from_the_model_is_lowered_to_what_fits() -> None:
    assert plan(599, max_model_len=4096, may_shorten=True) == KVCachePlan(5, 64)


@pytest.mark.parametrize("pool_bytes", [-10, 0, 199])
def test_no_room_for_a_single_block_is_refused_even_where_the_length_may_be_lowered(pool_bytes: int) -> None:
    with pytest.raises(OutOfMemoryError, match="room for no block at all"):
        plan(pool_bytes, may_shorten=True)


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max", "memory.current": str(GIB)}, 8 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(GIB)}, 3 * GIB),
        ({"memory.max": str(64 * GIB), "memory.current": str(GIB)}, 8 * GIB),
        ({"memory.max": str(4 * GIB)}, 4 * GIB),
        (
            {
                "memory.max": str(4 * GIB),
                "memory.current": str(3 * GIB),
                "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            },
            3 * GIB,
        ),
        ({"memory/memory.limit_in_bytes": str(2 * GIB), "memory/memory.usage_in_bytes": "0"}, 2 * GIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"}, 8 * GIB),
    ],
)
def test_available_memory_is_the_machines_or_the_rest_of_the_cgroups(
    tmp_path: Path, cgroup: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    for name, value in cgroup.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    assert available_cpu_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "expected_tokens", "most", "sequences"),
    [
        (1 + 960, 8192, 1536, 256, 10),
        (1 + 959, 8192, 1536, 256, 9),
        (1 + 960, 512, 1536, 256, 30),  # none can be longer than 512: guaranteed
        (1 + 100_000, 8192, 1536, 256, 256),
        (1 + 100_000, 8192, 1536, 64, 64),
        (1 + 90, 1440, 1536, 256, 1),
        (1 + 95, 1520, 5000, 256, 1),
    ],
)
def test_without_a_number_of_their_own_as_many_sequences_run_as_the_pool_holds(
    num_blocks: int, max_model_len: int, expected_tokens: int, most: int, sequences: int
) -> None:
    assert sequences_held(KVCachePlan(num_blocks, max_model_len), 16, expected_tokens, most) == sequences


def test_the_peak_of_work_is_seen_though_its_memory_is_given_back() -> None:
    def work() -> None:
        with mmap.mmap(-1, 64 << 20) as pages:  # fresh ones: an allocator may have kept some from before
            for place in range(0, len(pages), mmap.PAGESIZE):
                pages[place] = 1

    grown = peak_growth_bytes(work)
    assert grown is not None
    assert 60 << 20 < grown < 80 << 20
    small = peak_growth_bytes(lambda: None)
    assert small is not None
    assert small < 8 << 20  # the peak of before counts no longer


def test_a_kernel_that_keeps_no_peak_is_no_error(tmp_path: Path) -> None:
    assert peak_growth_bytes(lambda: None, tmp_path / "nowhere") is None
