"""Names of full blocks: equal names mean equal tokens in the block and in all blocks before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

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
