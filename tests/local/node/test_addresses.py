from __future__ import annotations

import pytest

from llmservice_local.node.addresses import AddressBlock


def test_two_clusters_get_two_blocks() -> None:
    first, second = AddressBlock(), AddressBlock()
    try:
        assert first.cidr != second.cidr
    finally:
        first.close()
        second.close()


def test_address_comes_back_last_and_a_full_block_says_so() -> None:
    block = AddressBlock()
    try:
        first = block.take()
        block.give_back(first)
        taken = [block.take() for _ in range(253)]
        assert taken[-1] == first
        assert len(set(taken)) == 253
        with pytest.raises(RuntimeError, match="all 253 pod addresses"):
            block.take()
    finally:
        block.close()
