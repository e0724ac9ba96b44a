"""Blocks of the KV cache: the pool, the hashes of the prefix cache, and the swap space in CPU memory."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat

import numpy as np

from llmservice_planner.model.block_groups import BlockGroups

HASH_BYTES = 16  # of a block; a cryptographic hash, because a collision would show one user another's keys and values


def hash_blocks(token_ids: Sequence[int], block_size: int, after: bytes) -> bytes:
    """The hashes of the full blocks of `token_ids`, concatenated; `after` is the hash of the block before.

    128,000 tokens take about 10 ms, so prompts are hashed by the HTTP processes.
    """
    num_bytes = array("q").itemsize * block_size
    tokens = memoryview(array("q", token_ids)).cast("B")
    hashes = []
    for first in range(0, len(token_ids) // block_size * num_bytes, num_bytes):
        after = blake2b(after + tokens[first : first + num_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(after)
    return b"".join(hashes)


def chain_start(salt: str | None, adapter_key: str | None = None) -> bytes:
    """What the first block is hashed after. A salt or an adapter keeps a chain apart from all others."""
    start = b"" if salt is None else blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt").digest()
    if adapter_key is None:
        return start
    return blake2b(start + adapter_key.encode(), digest_size=HASH_BYTES, person=b"adapter").digest()


class BlockHashes:
    """The chain of one sequence's full blocks, each hashed once, concatenated.

    `prompt` are the hashes of the prompt's blocks where they are known, as `hash_blocks` returns them.
    """

    def __init__(self, block_size: int, salt: str | None, prompt: bytes = b"", adapter_key: str | None = None) -> None:
        self._block_size = block_size
        self._hashes = prompt
        self._start = chain_start(salt, adapter_key)

    def first(self, count: int, token_ids: Sequence[int]) -> bytes:
        """The hashes of the first `count` blocks of `token_ids`, which only ever grow."""
        known = len(self._hashes) // HASH_BYTES
        if known < count:
            tokens = token_ids[known * self._block_size : count * self._block_size]
            self._hashes += hash_blocks(tokens, self._block_size, self._hashes[-HASH_BYTES:] or self._start)
        return self._hashes[: count * HASH_BYTES]


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

    def __init__(self, num_blocks: int, groups: BlockGroups) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.groups = groups
        self._oldest = num_blocks  # the two ends of the cached list; the null block is those of the free list
        self._next = [*range(1, num_blocks), NULL_BLOCK, self._oldest]
        self._previous = [num_blocks - 1, *range(num_blocks - 1), self._oldest]
        self.num_holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: list[dict[bytes, int]] = [{} for _ in range(len(groups))]
        self._group = [0] * num_blocks  # of those with a hash
        self.num_free = num_blocks - 1
        self.num_cached = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: those that are free, and those that are only cached."""
        return self.num_free + self.num_cached

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of the blocks, found by `lookup`, are only cached: to hold them takes from what is available."""
        num_holders = self.num_holders
        return sum([num_holders[block] == 0 for block in blocks])

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks: free ones first, then the cached ones that were unused for longest."""
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available: see num_available first")
        if count > self.num_free:
            self._evict(count - self.num_free)
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._next[block] = _HELD
            self.num_holders[block] = 1
            blocks.append(block)
        self.num_free -= count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Release one hold on each block. Raises ValueError, and frees nothing more, at a block that is not held."""
        for block in reversed(blocks):
            if not NULL_BLOCK < block < self.num_blocks or self._next[block] != _HELD:
                raise ValueError(f"block {block} is not held, so it cannot be freed")
            self.num_holders[block] -= 1
            if self.num_holders[block]:
                continue
            if self._hashes[block] is None:
                self._link(block, behind=NULL_BLOCK)
                self.num_free += 1
            else:
                self._link(block, behind=self._previous[self._oldest])
                self.num_cached += 1

    def register(self, blocks: Sequence[int], hashes: bytes, group: int = 0) -> list[int]:
        """Make held blocks of a group findable by their hashes; null blocks are left out.

        Returns those that were not, and have no equal one that is.
        """
        registered, by_hash = [], self._by_hash[group]
        for number, block in enumerate(blocks):
            block_hash = hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
            if block != NULL_BLOCK and self._hashes[block] is None and block_hash not in by_hash:
                self._hashes[block] = block_hash
                self._group[block] = group
                by_hash[block_hash] = block
                registered.append(block)
        return registered

    def unregister(self, block: int) -> None:
        """Forget the hash of a held block, whose content was not computed."""
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None:
            del self._by_hash[self._group[block]][block_hash]

    def lookup(self, hashes: bytes, first: int = 0) -> list[list[int]]:
        """Of each group, the blocks of a chain from block `first` on, as far as a sequence can go on behind them.

        What the next token does not see is not needed: it is the null block. They may be evicted until `hold`.
        """
        rest = hashes[first * HASH_BYTES :]
        each: list[bytes] = []
        found, end = [], len(rest) // HASH_BYTES
        for by_hash, window in zip(self._by_hash, self.groups.windows, strict=True):
            if window is None and rest[:HASH_BYTES] not in by_hash:
                end = 0
            if end == 0:
                return [[] for _ in self._by_hash]
            each = each or np.frombuffer(rest, f"V{HASH_BYTES}").tolist()
            blocks = list(map(by_hash.get, each, repeat(NULL_BLOCK)))
            if window is None and NULL_BLOCK in blocks:
                end = min(end, blocks.index(NULL_BLOCK))
            found.append(blocks)
        if not self.groups.slides:
            return [blocks[:end] for blocks in found]
        begins, end = self._visible(found, first, end)
        return [[NULL_BLOCK] * begin + blocks[begin:end] for blocks, begin in zip(found, begins, strict=True)]

    def _visible(self, found: list[list[int]], first: int, end: int) -> tuple[list[int], int]:
        """The most blocks, at most `end`, behind which all that a token sees is there, and where that begins."""
        groups = self.groups
        missing = [[place for place, block in enumerate(blocks[:end]) if block == NULL_BLOCK] for blocks in found]
        while True:
            start = (first + end) * groups.block_size
            begins = [max(0, groups.first_seen(group, start) - first) for group in range(len(groups))]
            gaps = [places[-1] for places, begin in zip(missing, begins, strict=True) if places and places[-1] >= begin]
            if not gaps:
                return begins, end
            end = min(gaps)
            for places in missing:
                while places and places[-1] >= end:
                    places.pop()

    def hold(self, blocks: Sequence[int]) -> None:
        """Share blocks that `lookup` has found; thousands at once for a long prompt. Null blocks are left out."""
        following, previous, num_holders = self._next, self._previous, self.num_holders
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if following[block] == _HELD:
                num_holders[block] += 1
                continue
            behind, before = following[block], previous[block]
            following[before], previous[behind] = behind, before
            following[block] = _HELD
            num_holders[block] = 1
            self.num_cached -= 1

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
            del self._by_hash[self._group[block]][block_hash]
            self._hashes[block] = None
            self._link(block, behind=NULL_BLOCK)
            self.num_cached -= 1
            self.num_free += 1

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
