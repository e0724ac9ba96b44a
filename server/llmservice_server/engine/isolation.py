"""What fails costs only those who made it fail.

A step that fails is computed again without them. What the host alone does for one request, with what the device has
computed for all, fails that request and nobody else; only an error of the device's own, met where the host waits for
it, is everybody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from llmservice_server.engine.plan import Plan
from llmservice_server.engine.request import Request

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


def execute_isolated(
    execute: Callable[[Plan], T], recover: Callable[[], None], plan: Plan
) -> tuple[list[T], dict[Request, str]]:
    """What `execute` has found out, in the plan's order, and who failed, with a sentence each.

    A step may be computed again: it writes the same keys and values to the same places. So after an exception each
    half of it is tried alone, down to single requests; where memory was short, the halves may all succeed. `recover`
    is called after each exception; it raises where the device itself is lost, and with it the engine.
    """
    try:
        return [execute(plan)], {}
    except Exception as error:
        _tell(plan, error)
        failure = _sentence(error)
    recover()
    if len(plan.scheduled) == 1:
        request = plan.scheduled[0].request
        return [], {request: failure}
    middle = len(plan.scheduled) // 2
    results: list[T] = []
    failed: dict[Request, str] = {}
    for half in (plan.scheduled[:middle], plan.scheduled[middle:]):
        computed, unable = execute_isolated(execute, recover, Plan(scheduled=half))
        results += computed
        failed |= unable
    return results, failed


def attempt(work: Callable[[], T], plan: Plan) -> T | None:
    """What `work` makes of `plan`; None after an exception, which the log tells of."""
    try:
        return work()
    except Exception as error:
        _tell(plan, error)
        return None


def blame(error: Exception) -> str:
    """A sentence for the one request for which the host was at work when `error` was raised; the log tells of it."""
    _LOG.warning("a request failed on the host", exc_info=error)
    return _sentence(error)


def _sentence(error: Exception) -> str:
    return f"the engine failed to compute this request ({type(error).__name__}): see the server's log"


def _tell(plan: Plan, error: Exception) -> None:
    _LOG.warning("a step of %d sequences failed", len(plan.scheduled), exc_info=error)
