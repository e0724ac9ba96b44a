"""Requests that wait for their grammar: they join the scheduler once it is compiled, and nobody waits with them."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait

from llmservice_server.engine.request import Request
from llmservice_server.sampling.grammar import Grammar, GrammarCompiler, GrammarError

_IDLE_WAIT_S = 0.05  # for a grammar where there is nothing else to do; messages wait as long


class Compiling:
    """The requests whose grammar is being compiled."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._futures: dict[Request, Future[Grammar]] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self, request: Request, grammar: str) -> None:
        self._futures[request] = self._compiler.compile(grammar)

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False where it was not here."""
        return self._futures.pop(request, None) is not None

    def take_ready(self, *, idle: bool) -> list[tuple[Request, GrammarError | None]]:
        """Requests that now have their grammar, or can have none; `idle`: wait a moment until there is one."""
        if idle and self._futures:
            wait(self._futures.values(), _IDLE_WAIT_S, FIRST_COMPLETED)
        done = [request for request, future in self._futures.items() if future.done()]
        return [(request, _resolve(request, self._futures.pop(request))) for request in done]


def _resolve(request: Request, future: Future[Grammar]) -> GrammarError | None:
    try:
        request.grammar = future.result()
    except GrammarError as error:
        return error
    return None
