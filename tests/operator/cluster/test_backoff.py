from __future__ import annotations

from itertools import pairwise

from llmservice_operator.cluster.backoff import Backoff


def test_the_first_failure_costs_nothing_and_each_further_one_more_up_to_a_bound() -> None:
    backoff = Backoff()

    pauses = [backoff.failed(float(now_s)) for now_s in range(12)]

    assert pauses[0] == 0
    assert 0.375 <= pauses[1] <= 0.5
    assert all(later > earlier for earlier, later in pairwise(pauses[:6]))
    assert all(7.5 <= pause <= 10 for pause in pauses[-5:])


def test_a_failure_long_after_the_one_before_is_a_first_one() -> None:
    backoff = Backoff()
    for now_s in (0.0, 1.0, 2.0):
        backoff.failed(now_s)

    assert backoff.failed(33.0) == 0
    assert backoff.failed(34.0) <= 0.5
