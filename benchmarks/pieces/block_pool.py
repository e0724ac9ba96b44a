"""Time of the block pool's operations, which run at every admission and after every 16 tokens."""

from __future__ import annotations

from collections.abc import Callable

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import BlockPool, hash_blocks
from pieces.timing import Timing, measure

NUM_BLOCKS = 50_000
CHAIN = 64  # blocks: a prompt of a thousand tokens
BLOCK_SIZE = 16


def measure_block_pool(count: int = 2000) -> dict[str, Timing]:
    """The time by operation; none changes the state of the pool."""
    pool = BlockPool(NUM_BLOCKS, BlockGroups(BLOCK_SIZE, num_layers=1))
    tokens = list(range(CHAIN * BLOCK_SIZE))
    chain = hash_blocks(tokens, BLOCK_SIZE, b"")
    held = pool.allocate(CHAIN)
    pool.register(held, chain)

    def share() -> None:
        [found] = pool.lookup(chain)
        pool.hold(found)
        pool.free(found)

    operations: dict[str, Callable[[], object]] = {
        "allocate and free 1 block": lambda: pool.free(pool.allocate(1)),
        f"allocate and free {CHAIN} blocks": lambda: pool.free(pool.allocate(CHAIN)),
        f"look up, hold and free a prefix of {CHAIN} blocks": share,
        f"hash {CHAIN} blocks": lambda: hash_blocks(tokens, BLOCK_SIZE, b""),
    }
    return {name: measure(operation, count) for name, operation in operations.items()}
