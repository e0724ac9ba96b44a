"""Copies of KV-cache blocks in CPU memory, for sequences that wait to be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from llmservice_server.engine.plan import BlockCopy

_STAGED = 16
"""Blocks that are gathered on the device at a time: some tens of megabytes of a large model's."""
_PIECE_BYTES = 1 << 28
"""Of pinned memory at a time: torch rounds what it pins up to a power of two, so 5 GiB in one piece would take 8."""


class SwappedBlocks:
    """`num_blocks` blocks, each with what all the caches hold of it in one row; pinned where the caches are on a GPU.

    `caches` are `[num_blocks, ...]` each. There a block is one copy that the host starts and does not wait for; all
    copies are in the order of the device's other work, so that a block is read before it is overwritten.
    """

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int, piece_bytes: int = _PIECE_BYTES) -> None:
        self.num_blocks = num_blocks
        self._device = caches[0].device
        self._caches = [cache.flatten(1).view(torch.int32) for cache in caches]
        self._sizes = [cache.shape[1] for cache in self._caches]
        self._blocks_each = max(1, piece_bytes // (4 * sum(self._sizes)))
        self._pieces = [
            torch.empty(
                (min(self._blocks_each, num_blocks - first), sum(self._sizes)),
                dtype=torch.int32,
                pin_memory=self._device.type == "cuda",
            )
            for first in range(0, num_blocks, self._blocks_each)
        ]

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        for batch in _batches(copies):
            sources = self._indices([copy.source for copy in batch])
            staged = torch.cat([cache.index_select(0, sources) for cache in self._caches], dim=1)
            for row, copy in zip(staged, batch, strict=True):
                self._row(copy.target).copy_(row, non_blocking=True)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        for batch in _batches(copies):
            staged = torch.empty((len(batch), sum(self._sizes)), dtype=torch.int32, device=self._device)
            for row, copy in zip(staged, batch, strict=True):
                row.copy_(self._row(copy.source), non_blocking=True)
            targets = self._indices([copy.target for copy in batch])
            for cache, part in zip(self._caches, torch.split(staged, self._sizes, dim=1), strict=True):
                cache.index_copy_(0, targets, part)

    def _row(self, block: int) -> torch.Tensor:
        return self._pieces[block // self._blocks_each][block % self._blocks_each]

    def _indices(self, blocks: list[int]) -> torch.Tensor:
        indices = torch.tensor(blocks, pin_memory=self._device.type == "cuda")
        return indices.to(self._device, non_blocking=True)


def _batches(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    remaining = iter(copies)
    while batch := list(islice(remaining, _STAGED)):
        yield batch
