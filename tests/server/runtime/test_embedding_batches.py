from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.runtime.embedding_batches import Batcher, Item, Pace


def test_without_a_measured_step_the_tokens_alone_bound_a_piece() -> None:
    pace = Pace()
    assert pace.rows(200) == 200
    assert pace.allows(10_000)


@pytest.mark.parametrize(("step_s", "row_s"), [(0.04, 0.0001), (0.04, 0.00002), (0.4, 0.0001)])
def test_a_piece_comes_to_take_less_than_a_fifth_of_a_step(step_s: float, row_s: float) -> None:
    """Of a layer whose weights take half a millisecond to read, however few tokens there are."""
    pace, spent = Pace(), []
    for _ in range(500):
        pace.add_step(step_s)
        rows = pace.rows(200)
        if pace.allows(rows):
            spent.append(0.0005 + rows * row_s)
            pace.add_piece(rows, spent[-1])
        else:
            spent.append(0.0)

    late = spent[100:]
    assert max(late) < 0.2 * step_s
    assert sum(late) <= 0.2 * step_s * len(late)
    assert rows == 200 or sum(late) > 0.08 * step_s * len(late), "the share is used"


def test_a_piece_that_costs_more_than_a_share_waits_for_the_credit_of_several_steps() -> None:
    pace = Pace()
    pace.add_step(0.04)
    pace.add_piece(16, 0.04)  # as much as a whole step

    waited = 0
    while not pace.allows(16):
        pace.add_step(0.04)
        waited += 1

    assert 10 < waited < 40


def _item(request_id: str, length: int, queued_s: float = 0.0, index: int = 0, client: str | None = None) -> Item:
    return Item(request_id, index, [1] * length, queued_s, client=client)


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
    batcher.add([_item("s", 4, 0.0), _item("L", 40, 0.001), _item("t", 3, 0.002)])
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
def test_every_item_leaves_once_within_bounds_and_never_after_the_window(
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


def test_one_clients_thousand_inputs_do_not_delay_another_client() -> None:
    batcher = _batcher()
    batcher.add([_item("m", 5, index=index, client="many") for index in range(1000)])
    assert _names(batcher.take(0.0)) == "mmmm"
    batcher.add([_item(name, length, 0.0, client="few") for name, length in (("a", 5), ("b", 7), ("c", 30))])
    assert _names(batcher.take(0.0)) == "ambm"
    assert _names(batcher.take(1.0)) == "c", "a bucket's turn is that of its first input"
    assert _names(batcher.take(1.0)) == "mmmm"


def test_a_client_saves_up_no_turns_and_gets_back_those_of_a_request_that_it_withdraws() -> None:
    batcher = _batcher(max_batch_size=1)
    batcher.add([_item("a", 5, client="a") for _ in range(9)])
    for _ in range(5):
        assert _names(batcher.take(0.0)) == "a"
    batcher.add([_item("x", 5, client="b", index=index) for index in range(50)])
    batcher.remove("x")
    batcher.add([_item("b", 5, client="b") for _ in range(4)])
    assert "".join(_names(batcher.take(0.0)) for _ in range(8)) in {"abababab", "babababa"}


def test_a_request_can_be_withdrawn_after_others_have_overtaken_it() -> None:
    batcher = _batcher()
    batcher.add([_item("s", 2, 1.0, client="a")])
    batcher.add([_item("m", 60, 1.0, client="b") for _ in range(9)])
    assert _names(batcher.take(1.0)) == "m", "full, while the short one waits for others"
    batcher.take(1.0)
    batcher.remove("s")
    assert _names(batcher.take(2.0)) == "m"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 60)), min_size=2, max_size=60))
def test_clients_that_wait_get_equal_tokens_but_for_a_batch_and_an_input(arrivals: list[tuple[str, int]]) -> None:
    """The bound of start-time fair queueing: the longest input of each client; and batches are of one length."""
    batcher = _batcher(max_batch_size=1)
    batcher.add([_item(client, length, client=client) for client, length in arrivals])
    waiting, tokens = Counter(client for client, _ in arrivals), Counter[str]()
    while waiting["a"] and waiting["b"]:
        (item,) = batcher.take(0.0)
        tokens[item.request_id] += len(item.token_ids)
        waiting[item.request_id] -= 1
        assert abs(tokens["a"] - tokens["b"]) <= 2 * 60


pytestmark = pytest.mark.slow
