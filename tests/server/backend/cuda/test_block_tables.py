"""The device's copies of block tables: what is sent, and what a row holds."""

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.backend.cuda import block_tables
from llmservice_server.backend.cuda.block_tables import BlockTables

CPU = torch.device("cpu")


def test_only_what_is_new_in_a_table_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counting(arrays, device):  # type: ignore[no-untyped-def]
        sent.append(arrays[1].size)
        return [torch.from_numpy(each) for each in arrays]

    monkeypatch.setattr(block_tables, "tables_to_device", counting)
    tables = BlockTables(CPU)
    tables.reserve(4, 8)
    first, second = array("i", [3, 5]), array("i", [7])
    tables.update([first, second])
    tables.update([first, second])
    second.append(9)
    rows = tables.update([second, first])
    assert sent == [3, 1]
    assert tables.matrix[rows.tolist(), :2].tolist() == [[7, 9], [3, 5]]


def test_a_table_that_is_another_object_is_sent_whole() -> None:
    tables = BlockTables(CPU)
    tables.update([array("i", [3, 5])])
    rows = tables.update([array("i", [4, 5])])
    assert tables.matrix[int(rows[0]), :2].tolist() == [4, 5]


def test_a_captured_matrix_stays_where_it_is() -> None:
    tables = BlockTables(CPU)
    tables.reserve(2, 4)
    tables.capture()
    matrix = tables.matrix
    for block in range(20):
        tables.update([array("i", [block]), array("i", [block + 1] * 16)])
    assert tables.matrix is matrix
    with pytest.raises(RuntimeError, match="3 tables of 1 blocks exceed the 2 of 16 captured"):
        tables.update([array("i", [1])] * 3)


@given(st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=5), max_size=20))
def test_rows_hold_the_tables_of_their_step(steps: list[list[tuple[int, int]]]) -> None:
    """Eight sequences take turns in a matrix of few rows; each may grow, and one without a change begins anew."""
    tables, sequences = BlockTables(CPU), [array("i", [number]) for number in range(8)]
    tables.reserve(5, 4)
    for step in steps:
        now = []
        for number, growth in dict(step).items():
            if growth == 0:
                sequences[number] = array("i", [number + 100])
            sequences[number].extend([number + 10 * growth] * growth)
            now.append(sequences[number])
        rows = tables.update(now).tolist()
        assert len({*rows}) == len(now)
        for row, table in zip(rows, now, strict=True):
            assert tables.matrix[row, : len(table)].tolist() == table.tolist()
