import numpy as np
import torch

from llmservice_server.backend.transfer import HostCopy, pack, to_device, unpack


def test_what_is_packed_for_one_copy_comes_out_as_it_went_in() -> None:
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


def test_on_the_cpu_nothing_is_copied() -> None:
    numbers = np.arange(5)
    there = to_device(numbers, torch.device("cpu"))
    [back] = HostCopy([there]).wait()
    assert back.data_ptr() == there.data_ptr() == numbers.ctypes.data
