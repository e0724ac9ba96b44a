"""The pool of KV-cache blocks: which are free, and which of them to take."""

from __future__ import annotations

from collections.abc import Sequence

NULL_BLOCK = 0
_HELD = -1


class BlockPool:
    """Blocks 1 … num_blocks-1 are free or held; block 0, the null block, never holds a token.

    The free list is threaded through the blocks themselves (`_next`, `_previous`), with the null block as its two ends,
    so that a block can be taken from the middle as cheaply as from the front. Freed blocks go to the front: their
    memory is still warm.

    Which block a sequence gets matters on CPU, where attention reads a run of neighbours in place and must copy
    anything else. So a sequence starts where it has room to grow, and that room is set aside: others take it only
    when nothing else is left. `_open` marks the blocks that are free and not set aside, a byte each, so that a run of
    them is found by a search for bytes.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._open = bytearray([0]) + bytearray([1]) * (num_blocks - 1)
        self._num_free = num_blocks - 1

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        return self.num_usable - self._num_free

    def is_free(self, block: int) -> bool:
        return NULL_BLOCK < block < self.num_blocks and self._next[block] != _HELD

    def can_allocate(self, count: int) -> bool:
        return count <= self._num_free

    def start(self, count: int, room: int) -> list[int]:
        """Take the first `count` blocks of a sequence that may grow by `room` more, as neighbours if possible."""
        for length in (count + room, count):
            first = self._open.find(b"\x01" * length)
            if first >= 0:
                blocks = self.allocate(count, after=first - 1)
                self._set_aside(blocks[-1] + 1, room)
                return blocks
        return self.allocate(count)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, each the neighbour of the one before (the first: of `after`) where that one is free."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks asked for, {self._num_free} free: call can_allocate first")
        blocks: list[int] = []
        last = after
        for _ in range(count):
            last = last + 1 if last is not None and self.is_free(last + 1) else self._next[NULL_BLOCK]
            self._unlink(last)
            self._next[last] = _HELD
            self._open[last] = 0
            blocks.append(last)
        self._num_free -= count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Raises ValueError, and frees nothing more, at a block that is not held."""
        for block in reversed(blocks):
            if not NULL_BLOCK < block < self.num_blocks or self._next[block] != _HELD:
                raise ValueError(f"block {block} is not held, so it cannot be freed")
            self._link(block, behind=NULL_BLOCK)
            self._open[block] = 1
            self._num_free += 1
            self._reopen(block + 1)

    def free_blocks(self) -> list[int]:
        """The free list in the order in which it would be handed out. O(n): for tests and integrity checks."""
        blocks = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _set_aside(self, first: int, count: int) -> None:
        """Put up to `count` open blocks from `first` on at the end of the free list."""
        for block in range(first, min(first + count, self.num_blocks)):
            if not self._open[block]:
                return
            self._open[block] = 0
            self._unlink(block)
            self._link(block, behind=self._previous[NULL_BLOCK])

    def _reopen(self, block: int) -> None:
        """What was set aside for a sequence lies behind its blocks; when it ends, anybody may start there."""
        while self.is_free(block) and not self._open[block]:
            self._open[block] = 1
            block += 1

    def _unlink(self, block: int) -> None:
        previous, following = self._previous[block], self._next[block]
        self._next[previous] = following
        self._previous[following] = previous

    def _link(self, block: int, behind: int) -> None:
        following = self._next[behind]
        self._next[behind], self._previous[block] = block, behind
        self._next[block], self._previous[following] = following, block
