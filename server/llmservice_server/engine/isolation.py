"""What fails costs only those who made it fail.

A batch that fails is computed again without them. What the host alone does for one request, with what the device has
computed for all, fails that request and nobody else; only an error of the device's own, met where the host waits for
it, is everybody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

_LOG = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")


def execute_isolated(
    execute: Callable[[list[S]], T], recover: Callable[[], None], batch: list[S]
) -> tuple[list[T], list[tuple[S, str]]]:
    """What `execute` has found out, in the batch's order, and who failed, with a sentence each.

    A batch may be computed again: a step writes the same keys and values to the same places. So after an exception each
    half of it is tried alone, down to single ones; where memory was short, the halves may all succeed. `recover`
    is called after each exception; it raises where the device itself is lost, and with it the engine.
    """
    try:
        return [execute(batch)], []
    except Exception as error:
        _tell(len(batch), error)
        failure = _sentence(error)
    recover()
    if len(batch) == 1:
        return [], [(batch[0], failure)]
    middle = len(batch) // 2
    results, failed = execute_isolated(execute, recover, batch[:middle])
    more_results, more_failed = execute_isolated(execute, recover, batch[middle:])
    return results + more_results, failed + more_failed


def attempt(work: Callable[[], T], num_sequences: int) -> T | None:
    """What `work` makes of a step; None after an exception, which the log tells of."""
    try:
        return work()
    except Exception as error:
        _tell(num_sequences, error)
        return None


def blame(error: Exception) -> str:
    """A sentence for the one request for which the host was at work when `error` was raised; the log tells of it."""
    _LOG.warning("a request failed on the host", exc_info=error)
    return _sentence(error)


def _sentence(error: Exception) -> str:
    return f"the engine failed to compute this request ({type(error).__name__}): see the server's log"


def _tell(num_sequences: int, error: Exception) -> None:
    _LOG.warning("a step of %d sequences failed", num_sequences, exc_info=error)
