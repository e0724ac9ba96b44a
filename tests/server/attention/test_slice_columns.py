from llmservice_server.attention.base import SequenceSlice
from llmservice_server.attention.slice_columns import SliceColumns

SLICES = [SequenceSlice(3, 1, [5]), SequenceSlice(6, 3, [2, 7, 4]), SequenceSlice(0, 1, [1])]


def test_columns_are_the_slices_that_they_were_made_of() -> None:
    columns = SliceColumns.of(SLICES)
    assert columns.starts.tolist() == [3, 6, 0]
    assert columns.counts.tolist() == [1, 3, 1]
    assert columns.joined_tables.blocks.tolist() == [5, 2, 7, 4, 1]
    assert list(columns) == SLICES
    assert [columns[place] for place in range(len(columns))] == SLICES
    assert list(columns[1:]) == SLICES[1:]


def test_columns_are_not_made_twice() -> None:
    columns = SliceColumns.of(SLICES)
    assert SliceColumns.of(columns) is columns
