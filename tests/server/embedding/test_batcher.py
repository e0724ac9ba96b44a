"""Who shares a batch with whom, and when it leaves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.embedding.batcher import Batcher, Item


def _item(request_id: str, length: int, queued_s: float = 0.0, index: int = 0) -> Item:
    return Item(request_id, index, [1] * length, queued_s)


def _batcher(window_s: float = 0.01, max_batch_tokens: int = 64, max_batch_size: int = 4) -> Batcher:
    return Batcher(window_s=window_s, max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size)


def _names(batch: list[Item]) -> str:
    return "".join(item.request_id for item in batch)


def test_an_input_waits_for_others_until_its_window_is_over() -> None:
    batcher = _batcher()
    assert batcher.due_s() is None
    batcher.add([_item("a", 5, 1.0), _item("b", 6, 1.005)])
    assert batcher.due_s() == 1.01
    assert batcher.take(1.009) == []
    assert _names(batcher.take(1.01)) == "ab"
    assert batcher.due_s() is None


def test_a_full_batch_does_not_wait() -> None:
    batcher = _batcher()
    batcher.add([_item(name, 5) for name in "abcde"])
    assert _names(batcher.take(0.0)) == "abcd"
    assert batcher.take(0.0) == []
    assert _names(batcher.take(0.01)) == "e"


def test_a_batch_is_full_by_tokens_with_the_padding_counted() -> None:
    batcher = _batcher(max_batch_tokens=64)
    batcher.add([_item("a", 30), _item("b", 32), _item("c", 17)])
    assert _names(batcher.take(0.0)) == "ab"


def test_an_input_longer_than_a_batch_is_computed_alone() -> None:
    batcher = _batcher(max_batch_tokens=64)
    batcher.add([_item("a", 100), _item("b", 100)])
    assert _names(batcher.take(0.0)) == "a"


def test_short_and_long_inputs_do_not_share_a_batch_and_the_oldest_goes_first() -> None:
    batcher = _batcher(max_batch_tokens=1000)
    batcher.add([_item("L", 40, 0.001), _item("s", 4, 0.0), _item("t", 3, 0.002)])
    assert _names(batcher.take(1.0)) == "st"
    assert _names(batcher.take(1.0)) == "L"


def test_a_request_taken_back_leaves_nothing_behind() -> None:
    batcher = _batcher()
    batcher.add([_item("a", 5, index=0), _item("b", 5), _item("a", 60, index=1)])
    batcher.remove("a")
    batcher.remove("unknown")
    assert _names(batcher.take(1.0)) == "b"
    assert batcher.due_s() is None


@pytest.mark.parametrize("max_batch_size", [1, 3, 8])
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 0.1)), max_size=40))
def test_everybody_leaves_once_within_bounds_and_never_after_the_window(
    max_batch_size: int, arrivals: list[tuple[int, float]]
) -> None:
    batcher = _batcher(max_batch_size=max_batch_size)
    arrivals.sort(key=lambda arrival: arrival[1])
    seen: list[int] = []
    for index, (length, at) in enumerate(arrivals):
        batcher.add([_item("a", length, at, index)])
    while (due := batcher.due_s()) is not None:
        batch = batcher.take(due)
        assert 1 <= len(batch) <= max_batch_size
        longest = max(len(item.token_ids) for item in batch)
        assert len(batch) == 1 or len(batch) * longest <= 64
        assert longest < 2 * min(len(item.token_ids) for item in batch) or longest == 1
        assert due <= min(item.queued_s for item in batch) + 0.01
        seen += [item.index for item in batch]
    assert sorted(seen) == list(range(len(arrivals)))


def test_a_batch_is_cut_to_the_tokens_that_are_left_but_never_to_nothing() -> None:
    batcher = _batcher()
    batcher.add([_item(name, 5) for name in "abcd"])
    assert _names(batcher.take(0.01, max_tokens=11)) == "ab"
    assert _names(batcher.take(0.01, max_tokens=3)) == "c"
    assert _names(batcher.take(0.01)) == "d"
