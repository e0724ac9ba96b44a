"""Requests that wait for their grammar: they join the scheduler once it is compiled, and no other request waits."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from llmservice_server.engine.request import Request
from llmservice_server.engine.runner import GrammarCompiler
from llmservice_server.types.errors import GrammarError

_IDLE_WAIT_S = 0.05  # for a grammar where there is nothing else to do; messages wait as long


class GrammarQueue:
    """The requests whose grammar is being compiled."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._futures: dict[Request, Future[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self, request: Request, grammar: str) -> None:
        self._futures[request] = self._compiler.compile(grammar)

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False where it was not here."""
        return self._futures.pop(request, None) is not None

    def take_ready(self, *, idle: bool) -> list[tuple[Request, str | None]]:
        """Requests that have their grammar by now, or can have none, and why; `idle`: wait a moment for the first."""
        if idle and self._futures:
            wait(self._futures.values(), _IDLE_WAIT_S, FIRST_COMPLETED)
        done = [request for request, future in self._futures.items() if future.done()]
        return [(request, _resolve(request, self._futures.pop(request))) for request in done]


def _resolve(request: Request, future: Future[Any]) -> str | None:
    if (fault := future.exception()) is not None:  # an error inside the library must not reach other requests
        return f"the grammar could not be compiled: {type(fault).__name__} in its compiler; try a simpler one"
    outcome = future.result()
    if isinstance(outcome, GrammarError):
        return str(outcome)
    request.grammar = outcome.start()
    return None
