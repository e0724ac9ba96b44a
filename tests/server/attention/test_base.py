import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.attention.base import JoinedTables, slots_of

BLOCK_SIZE = 4


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=6))
def test_every_token_has_the_slot_that_its_table_names(runs: list[tuple[int, int]]) -> None:
    tables = []
    first = 1
    for start, count in runs:
        num_blocks = -(-(start + count) // BLOCK_SIZE) + 1  # a table may be longer than what it holds
        tables.append(list(range(first, first + num_blocks))[::-1])
        first += num_blocks
    expected = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for (start, count), table in zip(runs, tables, strict=True)
        for position in range(start, start + count)
    ]
    starts, counts = np.array(runs, np.int64).T
    assert slots_of(starts, counts, JoinedTables.of(tables), BLOCK_SIZE).tolist() == expected
