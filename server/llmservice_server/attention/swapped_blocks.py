"""Copies of KV-cache blocks in CPU memory, for sequences that wait to be resumed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmservice_server.engine.plan import BlockCopy


class SwappedBlocks:
    """`num_blocks` blocks for each of a cache's layers, pinned where the cache is on a GPU.

    `caches` are the layers' caches, `[num_blocks, ...]` each. A call moves all of a step's blocks, with one gather, one
    transfer and one scatter a layer.
    """

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._caches = caches
        pinned = caches[0].device.type == "cuda"
        self._swapped = [
            torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=pinned) for cache in caches
        ]

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        sources, targets = _indices(copies)
        on_device = sources.to(self._caches[0].device)
        for cache, swapped in zip(self._caches, self._swapped, strict=True):
            swapped.index_copy_(0, targets, cache.index_select(0, on_device).cpu())

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        sources, targets = _indices(copies)
        device = self._caches[0].device
        on_device = targets.to(device)
        for cache, swapped in zip(self._caches, self._swapped, strict=True):
            cache.index_copy_(0, on_device, swapped.index_select(0, sources).to(device))


def _indices(copies: Sequence[BlockCopy]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([copy.source for copy in copies]), torch.tensor([copy.target for copy in copies])
