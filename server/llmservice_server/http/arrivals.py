"""The demand: what arrives, whether or not it is admitted, with the answers' lengths as predicted at that time.

Completions would not show it, because an overloaded server completes what it can, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmservice_planner.traffic.output_lengths import DEFAULT_SHARE, OutputLengths
from llmservice_server.engine.config import LANES
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.text.output_processor import RequestState
from llmservice_server.types.messages import GenerateRequest

COUNTED_HEADER = "x-llmservice-counted"
"""Sent by the gateway with a request that another pod has counted, and then refused or given back."""
_MEMORY = 300  # requests of a lane; older ones count ever less


@dataclass(slots=True)
class _Usual:
    """Of the requests of a lane."""

    count: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def add(self, prompt_tokens: int, output_tokens: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self.count
        self.output_tokens += (output_tokens - self.output_tokens) / self.count


class Arrivals:
    """Predicts the lengths of answers, learns from those that end, and counts what arrives."""

    def __init__(self, metrics: Metrics, expected_tokens: int) -> None:
        """`expected_tokens`: of a request, of which a part is assumed for an answer until some have ended."""
        self._metrics = metrics
        self._lengths = OutputLengths(DEFAULT_SHARE * expected_tokens)
        self._usual = {lane: _Usual() for lane in LANES}
        for lane in LANES:  # a rate has to see the first request
            self._count(lane, 0, 0, 0)

    def predict(self, prompt_tokens: int, max_tokens: int) -> float:
        """Tokens of an answer that may have `max_tokens`."""
        return min(max_tokens, self._lengths.predict(prompt_tokens))

    def arrived(self, requests: Iterable[GenerateRequest]) -> None:
        """Requests that are admitted or refused now; each is one sequence."""
        for request in requests:
            prompt_tokens, predicted_tokens = len(request.prompt_token_ids), request.predicted_tokens or 0.0
            self._usual[request.lane].add(prompt_tokens, predicted_tokens)
            self._count(request.lane, 1, prompt_tokens, predicted_tokens)

    def arrived_unread(self, lane: str) -> None:
        """A request that is refused before its body is read: it counts as a usual one."""
        usual = self._usual[lane]
        self._count(lane, 1, usual.prompt_tokens, usual.output_tokens)

    def ended(self, state: RequestState) -> None:
        """An answer has ended. One that was cut off would have been at least as long as predicted."""
        if state.finish_reason == "stop":
            self._lengths.observe(state.num_prompt_tokens, state.num_tokens)
        elif state.finish_reason == "length":
            predicted = self._lengths.predict(state.num_prompt_tokens)
            self._lengths.observe(state.num_prompt_tokens, max(state.num_tokens, predicted))

    def _count(self, lane: str, requests: int, prompt_tokens: float, output_tokens: float) -> None:
        metrics = self._metrics
        metrics.labels(metrics.arrived_requests, lane=lane).inc(requests)
        metrics.labels(metrics.arrived_prompt_tokens, lane=lane).inc(prompt_tokens)
        metrics.labels(metrics.arrived_output_tokens, lane=lane).inc(output_tokens)
