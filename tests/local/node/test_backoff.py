from __future__ import annotations

from llmservice_local.node.backoff import BackOff


def test_waits_double_up_to_five_minutes() -> None:
    backoff = BackOff()
    assert [backoff.next_delay(1) for _ in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]


def test_ten_good_minutes_wipe_the_slate() -> None:
    backoff = BackOff(1.0)
    waits = [backoff.next_delay(ran_s) for ran_s in (1, 1, 1, 600, 1)]
    assert waits == [0, 1, 2, 0, 1]
