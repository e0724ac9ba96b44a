"""A failing step costs only the requests that make it fail: the batch is computed again without them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from llmservice_server.types.errors import failure_sentence

_LOG = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")


def execute_isolated(
    execute: Callable[[list[S]], T], recover: Callable[[], None], batch: list[S]
) -> tuple[list[T], list[tuple[S, str]]]:
    """The results of `execute`, in the batch's order, and the items that failed, with a sentence each.

    Computing a batch again is harmless: a step writes the same keys and values to the same places. After an exception
    each half is tried alone, down to single items; where memory was short, the halves may all succeed. `recover` is
    called after each exception; it raises where the device itself is lost, and with it the engine.
    """
    try:
        return [execute(batch)], []
    except Exception as error:
        _log(len(batch), error)
        failure = failure_sentence(error)
    recover()
    if len(batch) == 1:
        return [], [(batch[0], failure)]
    middle = len(batch) // 2
    results, failed = execute_isolated(execute, recover, batch[:middle])
    more_results, more_failed = execute_isolated(execute, recover, batch[middle:])
    return results + more_results, failed + more_failed


def attempt(work: Callable[[], T], num_sequences: int) -> T | None:
    """The result of a step's `work`; None after an exception, which is logged."""
    try:
        return work()
    except Exception as error:
        _log(num_sequences, error)
        return None


def _log(num_sequences: int, error: Exception) -> None:
    _LOG.warning("a step of %d sequences failed", num_sequences, exc_info=error)
