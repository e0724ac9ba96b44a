"""Every token is in one tile for each key head; threads have about equal work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.backend.cpu.attention import balanced_order, query_tiles
from llmservice_server.backend.step_input import StepInput

BLOCK_SIZE = 16


def tiles_of(spans: list[tuple[int, int]], num_kv_heads: int, group: int, num_threads: int = 2) -> np.ndarray:
    step = StepInput.of([(start, count, range(-(-(start + count) // BLOCK_SIZE))) for start, count in spans])
    return query_tiles(step, num_kv_heads=num_kv_heads, group=group, num_threads=num_threads)


@given(
    spans=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 700)), min_size=1, max_size=8),
    num_kv_heads=st.integers(1, 4),
    group=st.integers(1, 8),
    num_threads=st.integers(1, 5),
)
def test_tiles_cover_every_token_and_key_head_once(
    spans: list[tuple[int, int]], num_kv_heads: int, group: int, num_threads: int
) -> None:
    expected = []
    row = first_block = 0
    for start, count in spans:
        for behind in range(count):
            expected += [(row + behind, start + behind, first_block, head) for head in range(num_kv_heads)]
        row += count
        first_block += -(-(start + count) // BLOCK_SIZE)
    covered = [
        (int(first_row + behind), int(end - num_tokens + behind), int(first_block), int(head))
        for first_row, num_tokens, end, first_block, head in tiles_of(spans, num_kv_heads, group, num_threads)
        for behind in range(num_tokens)
    ]
    assert sorted(covered) == sorted(expected)


def test_a_long_prompt_is_divided_into_tiles_of_similar_size() -> None:
    sizes = tiles_of([(0, 511)], num_kv_heads=1, group=3)[:, 1]
    assert len(sizes) == 6
    assert sizes.max() - sizes.min() <= 6


@pytest.mark.parametrize("num_threads", [2, 3, 4])
def test_equal_runs_of_the_order_have_about_equal_work(num_threads: int) -> None:
    work = np.arange(1, 61, dtype=np.int64) ** 2
    parts = work[balanced_order(work, num_threads)].reshape(num_threads, -1).sum(axis=1)
    assert parts.max() <= 1.1 * parts.min()
