"""A parallel loop calls each number once and reports errors."""

from typing import Any

import numpy as np
import pytest

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, use_threads


@compiled_inner()
def _count(number: int, counts: Any, scale: float, pair: Any) -> None:
    before, added = pair
    counts[number] += before[number] * scale + added


@compiled(nogil=True)
def _count_all(counts: Any, scale: float, pair: Any) -> None:
    for_each(_count, len(counts), (counts, scale, pair))


@compiled_inner()
def _refuse(number: int, refused: int) -> None:
    if number == refused:
        raise ValueError


@compiled()
def _refuse_one(count: int, refused: int) -> None:
    for_each(_refuse, count, (refused,))


@compiled_inner()
def _wait_for_the_others(number: int, done: Any, turns: Any) -> None:
    """The first number is done when all others are, or after many turns."""
    left = len(done) - 1
    while number == 0 and left and turns[0]:
        turns[0] -= 1
        left = len(done) - 1
        for each in done:
            left -= each
    done[number] = 1


@compiled(nogil=True)
def _do_all(done: Any, turns: Any) -> None:
    for_each(_wait_for_the_others, len(done), (done, turns))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 100])
def test_every_number_is_called_once_with_all_arguments(length: int, num_threads: int) -> None:
    use_threads(num_threads)
    counts, before = np.zeros(length), np.arange(length, dtype=np.int32)
    _count_all(counts, 0.5, (before, 3))
    np.testing.assert_array_equal(counts, np.arange(length) / 2 + 3)


@pytest.mark.parametrize("refused", [0, 4, 9])
def test_a_call_that_raises_fails_the_loop(refused: int) -> None:
    with pytest.raises(MemoryError, match="no memory left"):
        _refuse_one(10, refused)


def test_a_loop_without_errors_raises_nothing() -> None:
    _refuse_one(10, 10)


def test_a_thread_that_is_done_takes_the_numbers_of_one_that_waits() -> None:
    if use_threads(2) < 2:
        pytest.skip("needs two cores")
    done, turns = np.zeros(100, np.int64), np.array([100_000_000])
    _do_all(done, turns)
    assert turns[0] > 0
    assert done.all()
