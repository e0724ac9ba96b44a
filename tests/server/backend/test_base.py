from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.backend.step_input import StepInput

BLOCK_SIZE = 4


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6))
def test_every_token_has_the_slot_of_its_table(runs: list[tuple[int, int]]) -> None:
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
    step = StepInput.of([(*run, table) for run, table in zip(runs, tables, strict=True)])
    assert step.slots(BLOCK_SIZE).tolist() == expected


def test_arrays_agree_with_the_runs() -> None:
    step = StepInput.of([(3, 1, [5]), (6, 3, [2, 7, 4]), (0, 1, [1])], [9, 8, 7, 6, 5])
    assert len(step) == 3
    assert step.token_ids.tolist() == [9, 8, 7, 6, 5]
    assert step.positions.tolist() == [3, 6, 7, 8, 0]
    assert step.rows.tolist() == [0, 1, 4]
    assert step.blocks.tolist() == [5, 2, 7, 4, 1]
    assert step.table_firsts.tolist() == [0, 1, 4]
    assert not step.is_decode
    assert StepInput.of([(3, 1, [5]), (0, 1, [1])]).is_decode
