from llmservice_server.engine.block_hash import BlockHashes

TOKENS = list(range(40))


def hashes(tokens: list[int], salt: str | None = None, count: int = 4) -> list[bytes]:
    return BlockHashes(4, salt).first(count, tokens)


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
    assert chain.first(4, forgotten) == hashes(TOKENS)
    assert chain.first(2, forgotten) == first
