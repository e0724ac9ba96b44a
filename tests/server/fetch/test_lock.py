"""The lock of a shared cache, with a clock that the test moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmservice_server.fetch.lock import FolderLock, LockLostError

LEASE_S = 30.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _contender(folder: Path, clock: Clock) -> FolderLock:
    return FolderLock(folder, LEASE_S, clock=clock)


def test_one_of_many_gets_the_lock(tmp_path: Path, clock: Clock) -> None:
    contenders = [_contender(tmp_path, clock) for _ in range(10)]
    assert [one.try_acquire() for one in contenders].count(True) == 1


def test_a_released_lock_is_free_at_once(tmp_path: Path, clock: Clock) -> None:
    first, second = _contender(tmp_path, clock), _contender(tmp_path, clock)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.check()


def test_a_holder_that_beats_is_never_succeeded(tmp_path: Path, clock: Clock) -> None:
    first, second = _contender(tmp_path, clock), _contender(tmp_path, clock)
    assert first.try_acquire()
    for _ in range(100):
        clock.now += LEASE_S / 6
        assert first.beat()
        assert not second.try_acquire()
    first.check()


def test_a_silent_holder_is_succeeded_after_a_lease_by_one(tmp_path: Path, clock: Clock) -> None:
    first, others = _contender(tmp_path, clock), [_contender(tmp_path, clock) for _ in range(5)]
    assert first.try_acquire()
    assert not any(other.try_acquire() for other in others)
    clock.now += LEASE_S
    assert not any(other.try_acquire() for other in others)
    clock.now += 1
    assert [other.try_acquire() for other in others].count(True) == 1


def test_a_holder_that_slept_through_its_lease_stops_writing(tmp_path: Path, clock: Clock) -> None:
    first, second = _contender(tmp_path, clock), _contender(tmp_path, clock)
    assert first.try_acquire()
    assert not second.try_acquire()
    clock.now += LEASE_S + 1
    with pytest.raises(LockLostError):
        first.check()
    assert second.try_acquire()
    assert not first.beat()
    first.release()
    second.check()
    assert not first.try_acquire()
