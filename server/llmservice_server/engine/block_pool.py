"""Blocks of the KV cache: the pool, the hashes of the prefix cache, and the swap space in CPU memory."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

_SIZE = 16  # bytes; a cryptographic hash, because a collision would show one user another's keys and values


class BlockHashes:
    """The chain of one sequence's full blocks, each hashed once. A salt keeps its chain apart from all others."""

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        self._last = b"" if salt is None else blake2b(salt.encode(), digest_size=_SIZE, person=b"salt").digest()
        self._hashes: list[bytes] = []

    def first(self, count: int, token_ids: Sequence[int]) -> list[bytes]:
        """The hashes of the first `count` blocks of `token_ids`, which only ever grow."""
        size = self._block_size
        for block in range(len(self._hashes), count):
            tokens = array("q", token_ids[block * size : (block + 1) * size]).tobytes()
            self._last = blake2b(self._last + tokens, digest_size=_SIZE).digest()
            self._hashes.append(self._last)
        return self._hashes[:count]


NULL_BLOCK = 0
_HELD = -1


class BlockPool:
    """Blocks 1 … num_blocks-1 are free, held or cached; block 0, the null block, never holds a token.

    A block is held by as many sequences as share it. When the last of them ends, a block with a hash (`register`) stays
    findable as cached until its memory is needed, the longest unused first, and of one sequence the last block first:
    a chain's tail is useless without its head, not the other way round. A block without a hash is free at once.

    Free and cached blocks are two lists threaded through the blocks themselves (`_next`, `_previous`), so that a block
    can be taken from the middle as cheaply as from the front. Freed blocks go to the front: their memory is warm.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._oldest = num_blocks  # the two ends of the cached list; the null block is those of the free list
        self._next = [*range(1, num_blocks), NULL_BLOCK, self._oldest]
        self._previous = [num_blocks - 1, *range(num_blocks - 1), self._oldest]
        self._num_holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._num_free = num_blocks - 1
        self._num_cached = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        return self.num_usable - self._num_free - self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: those that are free, and those that are only cached."""
        return self._num_free + self._num_cached

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def can_allocate(self, count: int, beside: Sequence[int] = ()) -> bool:
        """Whether `count` blocks can be had after the blocks `beside`, found by `lookup`, are held."""
        return count <= self.num_available - sum(self._num_holders[block] == 0 for block in beside)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks: free ones first, then the cached ones that were unused for longest."""
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} free: call can_allocate first")
        if count > self._num_free:
            self._evict(count - self._num_free)
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._hold(block)
            blocks.append(block)
        self._num_free -= count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Release one hold on each block. Raises ValueError, and frees nothing more, at a block that is not held."""
        for block in reversed(blocks):
            if not NULL_BLOCK < block < self.num_blocks or self._next[block] != _HELD:
                raise ValueError(f"block {block} is not held, so it cannot be freed")
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._hashes[block] is None:
                self._link(block, behind=NULL_BLOCK)
                self._num_free += 1
            else:
                self._link(block, behind=self._previous[self._oldest])
                self._num_cached += 1

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a held, computed block findable by its hash; a second block with the same content is not registered."""
        if self._hashes[block] is None and block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block

    def lookup(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain. They may be evicted until `hold` has them."""
        found = (self._by_hash.get(block_hash, NULL_BLOCK) for block_hash in block_hashes)
        return list(takewhile(lambda block: block != NULL_BLOCK, found))

    def hold(self, blocks: Sequence[int]) -> None:
        """Share blocks that `lookup` has found."""
        for block in blocks:
            if self._next[block] == _HELD:
                self._num_holders[block] += 1
            else:
                self._hold(block)
                self._num_cached -= 1

    def free_blocks(self) -> list[int]:
        """The free list in the order in which it would be handed out. O(n): for tests and integrity checks."""
        return self._walk(NULL_BLOCK)

    def cached_blocks(self) -> list[int]:
        """The cached blocks in the order in which they would be evicted. O(n): for tests and integrity checks."""
        return self._walk(self._oldest)

    def _walk(self, ends: int) -> list[int]:
        blocks = []
        block = self._next[ends]
        while block != ends:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _evict(self, count: int) -> None:
        """Forget the `count` cached blocks that were unused for longest; they are free then."""
        for _ in range(count):
            block = self._next[self._oldest]
            block_hash = self._hashes[block]
            assert block_hash is not None  # noqa: S101  # cached means that it has one
            self._unlink(block)
            del self._by_hash[block_hash]
            self._hashes[block] = None
            self._link(block, behind=NULL_BLOCK)
            self._num_cached -= 1
            self._num_free += 1

    def _hold(self, block: int) -> None:
        self._unlink(block)
        self._next[block] = _HELD
        self._num_holders[block] = 1

    def _unlink(self, block: int) -> None:
        previous, following = self._previous[block], self._next[block]
        self._next[previous] = following
        self._previous[following] = previous

    def _link(self, block: int, behind: int) -> None:
        following = self._next[behind]
        self._next[behind], self._previous[block] = block, behind
        self._next[block], self._previous[following] = following, block


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
