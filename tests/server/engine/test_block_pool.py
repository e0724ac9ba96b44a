import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import (
    HASH_BYTES,
    BlockHashes,
    BlockPool,
    PreemptionCost,
    SwapSpace,
    chain_start,
    hash_blocks,
)

TOKENS = list(range(40))


def hashes(tokens: list[int], salt: str | None = None, count: int = 4) -> list[bytes]:
    return split(BlockHashes(4, salt).first(count, tokens))


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def test_equal_beginnings_have_equal_hashes_and_differ_from_the_first_difference_on() -> None:
    other = [*TOKENS[:9], 99, *TOKENS[10:]]
    mine, theirs = hashes(TOKENS), hashes(other)
    assert mine[:2] == theirs[:2]
    assert mine[2] != theirs[2]
    assert mine[3] != theirs[3]  # its own tokens are the same, but not what came before


def test_a_salt_separates_every_block_and_no_salt_is_no_empty_one() -> None:
    chains = [hashes(TOKENS, salt) for salt in (None, "", "a", "b")]
    assert len({block for chain in chains for block in chain}) == 16


def test_hashes_are_computed_once_and_as_far_as_asked() -> None:
    chain = BlockHashes(4, None)
    first = chain.first(2, TOKENS)
    forgotten = [-1] * 8 + TOKENS[8:]  # what is hashed is not read again
    assert split(chain.first(4, forgotten)) == hashes(TOKENS)
    assert chain.first(2, forgotten) == first


@pytest.mark.parametrize("salt", [None, "a"])
def test_hashes_of_a_prompt_that_come_with_it_continue_as_if_computed_here(salt: str | None) -> None:
    sent = hash_blocks(TOKENS[:11], 4, chain_start(salt))
    assert split(BlockHashes(4, salt, sent).first(4, TOKENS)) == hashes(TOKENS, salt)


GROUPS = BlockGroups(4, num_layers=1)


def found_in(pool: BlockPool, chain: bytes) -> list[int]:
    [found] = pool.lookup(chain)
    return found


class PoolUnderUse(RuleBasedStateMachine):
    """Sequences that grow and end in any order, against a plain set of what each of them holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24, GROUPS)
        self.sequences: list[list[int]] = []

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        self.sequences.append(self.pool.allocate(count))

    @precondition(lambda self: self.sequences and self.pool.num_free > 0)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence += self.pool.allocate(1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.free(self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1))))

    @invariant()
    def free_and_held_make_the_total(self) -> None:
        assert self.pool.num_free + self.pool.num_held == self.pool.num_usable == 23
        assert self.pool.num_held == sum(map(len, self.sequences))

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        held = [block for sequence in self.sequences for block in sequence]
        assert sorted(held + self.pool.free_blocks()) == list(range(1, 24))


PoolUnderUse.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool_under_use = PoolUnderUse.TestCase


def test_freed_blocks_are_taken_again_first_and_in_their_order() -> None:
    pool = BlockPool(10, GROUPS)
    first = pool.allocate(3)
    pool.allocate(2)
    pool.free(first)
    assert pool.allocate(3) == first

    pool = BlockPool(4, GROUPS)
    assert pool.num_available < 4
    with pytest.raises(ValueError, match="4 blocks asked for, 3 available"):
        pool.allocate(4)
    assert pool.num_free == 3


@pytest.mark.parametrize("block", [0, 3, -1, 9])
def test_freeing_a_block_that_is_not_held_is_refused(block: int) -> None:
    pool = BlockPool(4, GROUPS)
    pool.allocate(2)
    with pytest.raises(ValueError, match=f"block {block} is not held"):
        pool.free([block])
    assert pool.num_held == 2


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="got 1 blocks"):
        BlockPool(1, GROUPS)


def name(*tokens: int) -> bytes:
    return b"".join(bytes([token]) * HASH_BYTES for token in tokens)


def cached_pool(num_blocks: int, *chains: bytes) -> BlockPool:
    """Each chain was the beginning of a sequence that has ended."""
    pool = BlockPool(num_blocks, GROUPS)
    held = [pool.allocate(len(chain) // HASH_BYTES) for chain in chains]
    for blocks, chain in zip(held, chains, strict=True):
        pool.register(blocks, chain)
        pool.free(blocks)
    return pool


def test_a_freed_block_with_a_hash_stays_findable_until_its_memory_is_needed() -> None:
    pool = cached_pool(6, name(1, 2, 3))
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 3, 0)
    assert found_in(pool, name(1, 2, 3, 4)) == [1, 2, 3]
    assert found_in(pool, name(9, 2)) == []
    pool.allocate(5)
    assert found_in(pool, name(1)) == []


def test_the_longest_unused_chain_is_evicted_first_and_its_tail_before_its_head() -> None:
    pool = cached_pool(7, name(1, 2, 3), name(4, 5, 6))
    pool.allocate(2)
    assert found_in(pool, name(1, 2, 3)) == [1]
    assert found_in(pool, name(4, 5, 6)) == [4, 5, 6]


def test_use_makes_a_chain_young_again() -> None:
    pool = cached_pool(7, name(1, 2, 3), name(4, 5, 6))
    pool.hold(blocks := found_in(pool, name(1, 2, 3)))
    pool.free(blocks)
    pool.allocate(3)
    assert found_in(pool, name(1, 2, 3)) == [1, 2, 3]
    assert found_in(pool, name(4, 5, 6)) == []

    pool = cached_pool(4, name(1))
    for _ in range(2):
        pool.hold(found_in(pool, name(1)))
    pool.free([1])
    assert (pool.num_held, pool.num_holders[1]) == (1, 1)
    pool.free([1])
    assert (pool.num_held, pool.num_cached) == (0, 1)
    with pytest.raises(ValueError, match="block 1 is not held"):
        pool.free([1])


def test_of_two_blocks_with_the_same_content_one_is_kept() -> None:
    pool = cached_pool(6, name(1), name(1))
    assert (pool.num_cached, pool.num_free) == (1, 4)


def test_what_a_found_prefix_takes_from_the_cache_cannot_be_allocated_as_well() -> None:
    pool = cached_pool(5, name(1, 2, 3))
    found = found_in(pool, name(1, 2))
    assert (pool.num_available, pool.num_unheld(found)) == (4, 2)
    pool.hold(found)
    assert (pool.num_available, pool.num_unheld(found)) == (2, 0)


def test_a_block_whose_content_was_not_computed_is_forgotten_and_free_once_it_is_released() -> None:
    pool = BlockPool(6, GROUPS)
    blocks = pool.allocate(2)
    assert pool.register(blocks, name(1, 2)) == blocks
    assert pool.register(pool.allocate(1), name(1)) == []  # its content is there already
    pool.unregister(blocks[1])
    assert found_in(pool, name(1, 2)) == blocks[:1]
    pool.free(blocks)
    assert (pool.num_cached, pool.num_free) == (1, 3)


def test_a_chain_is_found_as_far_as_all_that_its_next_token_sees_is_there() -> None:
    """Blocks of 4 tokens: behind three of them, the next token sees the last two of the group with a window of 7."""
    pool = BlockPool(20, BlockGroups(4, 1, (None, 7)))
    full, windowed = pool.allocate(5), pool.allocate(5)
    pool.register(full, name(1, 2, 3, 4, 5))
    pool.register(windowed, name(1, 2, 3, 4, 5), group=1)
    assert pool.lookup(name(1, 2, 3, 4, 5)) == [full, [0, 0, 0, *windowed[3:]]]
    assert pool.lookup(name(1, 2, 3, 4, 5), first=4) == [full[4:], windowed[4:]]
    pool.unregister(windowed[3])
    assert pool.lookup(name(1, 2, 3, 4, 5)) == [full[:3], [0, *windowed[1:3]]]
    pool.unregister(full[2])
    assert pool.lookup(name(1, 2, 3, 4, 5)) == [full[:2], windowed[:2]]
    pool.unregister(full[0])
    assert pool.lookup(name(1, 2, 3, 4, 5)) == [[], []]


COST = PreemptionCost(copy_block_s=1.0, compute_token_s=0.25)


def test_swapping_pays_where_both_copies_cost_less_than_computing_again() -> None:
    space = SwapSpace(10, COST)
    assert not space.pays(num_blocks=2, num_tokens=16)  # 4 s against 4 s
    assert space.pays(num_blocks=2, num_tokens=17)


def test_swapping_does_not_pay_where_there_is_no_room() -> None:
    space = SwapSpace(3, COST)
    assert space.pays(3, 1000)
    space.allocate(1)
    assert not space.pays(3, 1000)


def test_the_lowest_blocks_are_given_out_first_so_that_copies_lie_together() -> None:
    space = SwapSpace(6, COST)
    assert space.allocate(4) == [0, 1, 2, 3]
    space.free([2, 0])
    assert space.allocate(3) == [0, 2, 4]
    assert space.num_free == 1
