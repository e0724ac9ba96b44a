import pytest
import torch

from llmservice_server.engine.plan import BlockCopy
from llmservice_server.runtime.swapped_blocks import SwappedBlocks


def test_blocks_go_out_in_any_order_and_come_back_elsewhere_unchanged() -> None:
    caches = [torch.randn(6, 4, 2, 3) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    swapped = SwappedBlocks(caches, num_blocks=3)
    swapped.swap_out([BlockCopy(5, 0), BlockCopy(2, 2)])
    for cache in caches:
        cache[2] = cache[5] = 0
    swapped.swap_in([BlockCopy(0, 1), BlockCopy(2, 4)])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[1], old[5])
        assert torch.equal(cache[4], old[2])
        assert torch.equal(cache[3], old[3])


def test_blocks_are_kept_in_pieces_of_memory_and_none_is_lost_between_two() -> None:
    cache = torch.arange(8 * 4.0).view(8, 4)
    before = cache.clone()
    swapped = SwappedBlocks([cache], num_blocks=7, piece_bytes=3 * 4 * 4 + 1)
    swapped.swap_out([BlockCopy(block + 1, block) for block in range(7)])
    cache.zero_()
    swapped.swap_in([BlockCopy(block, block + 1) for block in range(7)])
    assert torch.equal(cache[1:], before[1:])


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_any_number_of_blocks_moves_with_all_that_belongs_to_it(count: int) -> None:
    """As an fp8 cache has it: bytes, and the scales of their rows."""
    payload = torch.randint(0, 256, (count + 1, 2, 2, 4, 6), dtype=torch.uint8)
    scales = torch.randn(count + 1, 2, 2, 4)
    before = payload.clone(), scales.clone()
    swapped = SwappedBlocks([payload, scales], num_blocks=count)
    swapped.swap_out([BlockCopy(block + 1, block) for block in range(count)])
    payload.zero_()
    scales.zero_()
    swapped.swap_in([BlockCopy(block, count - block) for block in range(count)])
    assert torch.equal(payload[1:], before[0][1:].flip(0))
    assert torch.equal(scales[1:], before[1][1:].flip(0))
