import numpy as np
import torch

from llmservice_server.backend.transfer import HostCopy, pack, tables_to_device, to_device, unpack


def test_unpack_inverts_pack() -> None:
    tensors = [
        torch.tensor([3, -1, 128_255]),
        torch.tensor([[0.5, -torch.inf], [torch.nan, 1e-30]]),
        torch.tensor([[[7], [9]]], dtype=torch.int32),
        torch.randn(4, 6)[:, ::2],  # not contiguous
    ]
    words = pack(tensors)
    assert (words.dtype, words.shape) == (torch.int32, (3 + 4 + 2 + 12,))
    for before, after in zip(tensors, unpack(words, tensors), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True, check_dtype=False)


def test_nothing_is_copied_on_the_cpu() -> None:
    numbers = np.arange(5)
    there = to_device(numbers, torch.device("cpu"))
    [back] = HostCopy([there]).wait()
    assert back.data_ptr() == there.data_ptr() == numbers.ctypes.data


def test_tables_of_any_size_are_aligned() -> None:
    arrays = [np.zeros((0, 16), np.int32), np.array([7], np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)]
    moved = tables_to_device(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, moved, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.numel() == 0 or tensor.storage_offset() % 4 == 0
