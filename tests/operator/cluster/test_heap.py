from __future__ import annotations

import gc
import weakref

from llmservice_operator.cluster.heap import expect_many, settle


class Node:
    """Two of them can hold each other."""

    other: Node | None = None


def knot() -> weakref.ref[Node]:
    """A cycle that nobody holds any more, and a way to see whether it is gone."""
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_what_is_alive_is_taken_out_of_full_collections_and_garbage_is_not() -> None:
    kept, garbage = [{} for _ in range(1000)], knot()
    try:
        settle()
        assert garbage() is None
        assert gc.get_freeze_count() > len(kept)
        assert all(one is not kept for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_cycle_that_is_made_later_is_collected_as_ever() -> None:
    try:
        settle()
        later = knot()
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()


def test_what_is_made_while_the_cache_fills_is_looked_through_seldom() -> None:
    before, rounds = gc.get_threshold(), gc.get_stats()[0]["collections"]
    try:
        expect_many()
        kept = [{} for _ in range(10_000)]
        assert gc.get_stats()[0]["collections"] <= rounds + 1
        assert len(kept) == 10_000
    finally:
        gc.set_threshold(*before)
