import numpy as np
import torch

from llmservice_server.backend.base import StepInput
from llmservice_server.backend.cuda.step_tables import StepTables, padded_tables, to_device


def test_single_tokens_are_apart_from_chunks_and_all_have_their_slots() -> None:
    runs = [(3, 1, [5]), (6, 3, [2, 7, 4]), (0, 1, [1])]
    tables = StepTables.of(StepInput.of(runs), block_size=4)
    assert tables.slots.tolist() == [5 * 4 + 3, 7 * 4 + 2, 7 * 4 + 3, 4 * 4, 4]
    assert tables.decode_rows.tolist() == [0, 4]
    assert tables.decode_lengths.tolist() == [4, 1]
    assert tables.decode_tables[:, 0].tolist() == [5, 1]
    assert tables.chunks.tolist() == [[1, 6, 3]]
    assert tables.chunk_tables[0, :4].tolist() == [2, 7, 4, 0]


def test_tables_are_filled_up_with_the_null_block_to_a_width_that_seldom_changes() -> None:
    tables = padded_tables(StepInput.of([(0, 1, [3, 1]), (0, 1, range(1, 18))]))
    assert tables.shape == (2, 32)
    assert tables[0].tolist() == [3, 1] + [0] * 30
    assert tables[1].tolist() == [*range(1, 18)] + [0] * 15


def test_arrays_of_any_size_come_over_aligned() -> None:
    arrays = [np.zeros((0, 16), np.int32), np.array([7], np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)]
    moved = to_device(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, moved, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.numel() == 0 or tensor.storage_offset() % 4 == 0
