"""Embedding requests in, vectors out, one batch at a time, between the steps of those who generate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmservice_server.embedding.batcher import Batcher, Item
from llmservice_server.embedding.model import EmbeddingModel
from llmservice_server.engine.isolation import execute_isolated
from llmservice_server.messages import Embed, Embedded

_MAX_BATCH_SIZE = 64


@dataclass(slots=True)
class _Waiting:
    vectors: list[bytes]  # empty where an input is not computed yet
    num_missing: int


class Embedder:
    """Refuses what it can never serve, and answers for what fails, so that the engine lives on."""

    def __init__(
        self,
        model: EmbeddingModel,
        recover: Callable[[], None],
        *,
        vocab_size: int,
        max_tokens: int,
        max_batch_tokens: int,
        window_s: float,
    ) -> None:
        """`max_tokens`: of one input. `max_batch_tokens`: of one forward pass, padding included.

        `recover` makes the device usable after an exception, and raises where it is lost.
        """
        self._model = model
        self._recover = recover
        self._vocab_size = vocab_size
        self.max_tokens = max_tokens
        self._batcher = Batcher(window_s=window_s, max_batch_tokens=max_batch_tokens, max_batch_size=_MAX_BATCH_SIZE)
        self._waiting: dict[str, _Waiting] = {}

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self._model.size

    def add(self, message: Embed, now: float) -> Embedded | None:
        """Queue a request; returns the answer to one that is refused."""
        if (problem := self._why_refused(message)) is not None:
            return Embedded(request_id=message.request_id, error=problem, error_status=400)
        self._waiting[message.request_id] = _Waiting([b""] * len(message.inputs), len(message.inputs))
        self._batcher.add(Item(message.request_id, index, ids, now) for index, ids in enumerate(message.inputs))
        return None

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are passed over."""
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None:
                self._batcher.remove(request_id)

    def due_s(self) -> float | None:
        """When `step` has something to do; None where nothing waits."""
        return self._batcher.due_s()

    def step(self, now: float) -> list[Embedded]:
        """Compute the batch that is due, if there is one; returns the requests that it completes."""
        batch = self._batcher.take(now)
        if not batch:
            return []
        results, failures = execute_isolated(self._embed, self._recover, batch)
        done = [answer for item, problem in failures for answer in self._fail(item, problem)]
        for item, vector in itertools.chain.from_iterable(results):
            done += self._take(item, vector)
        return done

    def _embed(self, batch: list[Item]) -> list[tuple[Item, np.ndarray]]:
        vectors = self._model.embed([item.token_ids for item in batch])
        return list(zip(batch, vectors.numpy().astype("<f4", copy=False), strict=True))

    def _take(self, item: Item, vector: np.ndarray) -> list[Embedded]:
        if not np.isfinite(vector).all():
            return self._fail(item, "the model's states are not finite: the weights or the dtype overflow")
        waiting = self._waiting.get(item.request_id)
        if waiting is None:
            return []  # another input of the same request has failed
        waiting.vectors[item.index] = vector.tobytes()
        waiting.num_missing -= 1
        if waiting.num_missing:
            return []
        del self._waiting[item.request_id]
        return [Embedded(request_id=item.request_id, vectors=waiting.vectors)]

    def _fail(self, item: Item, error: str) -> list[Embedded]:
        if item.request_id not in self._waiting:
            return []
        self.abort([item.request_id])
        return [Embedded(request_id=item.request_id, error=error)]

    def _why_refused(self, message: Embed) -> str | None:
        if message.request_id in self._waiting:
            return f"a request with the id {message.request_id} is being served, expected a new id"
        if not message.inputs or not all(message.inputs):
            return "an input has no tokens, expected at least one"
        if (longest := max(map(len, message.inputs))) > self.max_tokens:
            return f"an input has {longest} tokens, expected at most {self.max_tokens}: shorten it"
        if min(map(min, message.inputs)) < 0 or max(map(max, message.inputs)) >= self._vocab_size:
            return f"an input holds a token id outside the model's vocabulary, expected 0 to {self._vocab_size - 1}"
        return None
