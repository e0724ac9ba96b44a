from __future__ import annotations

import pytest
from tenacity import RetryCallState

from llmservice_server.fetch.source import RetryableError, retrying


@pytest.mark.parametrize(
    ("attempt", "retry_after_s", "at_least_s", "at_most_s"),
    [(1, None, 0.0, 1.0), (4, None, 0.0, 8.0), (20, None, 0.0, 60.0), (1, 7.0, 7.0, 7.0), (1, 3600.0, 60.0, 60.0)],
)
def test_the_backoff_is_bounded_and_honours_retry_after(
    attempt: int, retry_after_s: float | None, at_least_s: float, at_most_s: float
) -> None:
    request = retrying(attempts=7, longest_wait_s=60.0)
    state = RetryCallState(request, None, (), {})
    state.attempt_number = attempt
    error = RetryableError("HTTP 503", retry_after_s)
    state.set_exception((type(error), error, None))
    assert at_least_s <= request.wait(state) <= at_most_s


def test_attempts_are_counted_from_the_last_that_received_a_byte() -> None:
    progressed = [False, True, False, True, False, False, False, False]

    def request() -> None:
        error = RetryableError("cut")
        error.progressed = progressed.pop(0)
        raise error

    with pytest.raises(RetryableError, match="cut"):
        retrying(attempts=3, longest_wait_s=0.0)(request)
    assert len(progressed) == 2
