"""Where preempted sequences' blocks wait in CPU memory, and when that is worth the copies."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Seconds, as measured on the device at start."""

    copy_block_s: float  # one block, one way
    compute_token_s: float


class SwapSpace:
    """Blocks in CPU memory, the lowest numbers first, so that what is copied together lies together."""

    def __init__(self, num_blocks: int, cost: PreemptionCost) -> None:
        self.num_blocks = num_blocks
        self.cost = cost
        self._free = list(range(num_blocks))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Copying `num_blocks` out and in again is cheaper than computing their `num_tokens` again, and they fit."""
        return num_blocks <= self.num_free and (
            2 * num_blocks * self.cost.copy_block_s < num_tokens * self.cost.compute_token_s
        )

    def allocate(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)
