import torch

from llmservice_server.attention.swapped_blocks import SwappedBlocks
from llmservice_server.engine.plan import BlockCopy


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
