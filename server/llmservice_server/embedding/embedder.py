"""Embedding requests in, vectors out, one batch at a time, between the steps of those who generate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llmservice_server.embedding.batcher import Batcher, Item
from llmservice_server.embedding.model import EmbeddingModel
from llmservice_server.engine.isolation import execute_isolated
from llmservice_server.messages import Embed, Embedded

_MAX_BATCH_SIZE = 64
_PASSES = 8
"""Between two steps of those who generate at most this part of a batch's layers is computed: a layer costs a small
batch as much as it costs a step, for both read its weights."""


@dataclass(slots=True)
class _Waiting:
    vectors: list[bytes]  # empty where an input is not computed yet
    num_missing: int


@dataclass(slots=True)
class _Batch:
    """One that is being computed."""

    items: list[Item]
    by_layer: Iterator[torch.Tensor | None]  # None after each layer, the vectors at the end
    results: list[list[tuple[Item, np.ndarray]]] = field(default_factory=list)  # empty where it has failed

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return len(self.items) * max(len(item.token_ids) for item in self.items)


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
        self._batch: _Batch | None = None
        self._tokens_left = 0  # by the steps so far, which no layer has used

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
        return self._batcher.due_s() if self._batch is None else 0.0

    def step(self, now: float, max_tokens: int | None = None) -> list[Embedded]:
        """Compute the batch that is due, if there is one; returns the requests that it completes.

        `max_tokens`: that the step of those who generate leaves; None: nobody generates. A batch is cut to them and
        computed layer by layer between the steps. An input cannot be cut: each layer of a longer one waits until as
        many have been left.
        """
        if self._batch is None:
            items = self._batcher.take(now, max_tokens)
            if not items:
                return []
            self._batch = _Batch(items, self._model.embed_by_layer([item.token_ids for item in items]))
            self._tokens_left = 0
        return self._finish(self._batch) if self._compute(self._batch, max_tokens) else []

    def _embed(self, batch: list[Item]) -> list[tuple[Item, np.ndarray]]:
        return self._with_vectors(batch, self._model.embed([item.token_ids for item in batch]))

    def _with_vectors(self, batch: list[Item], vectors: torch.Tensor) -> list[tuple[Item, np.ndarray]]:
        return list(zip(batch, vectors.numpy().astype("<f4", copy=False), strict=True))

    def _compute(self, batch: _Batch, max_tokens: int | None) -> bool:
        """Compute as many layers as may be; True at the end, or where one has failed."""
        num_layers = self._model.num_layers + 1  # the pooling counts as one
        if max_tokens is not None:
            self._tokens_left += max_tokens
            num_layers = min(max(1, num_layers // _PASSES), self._tokens_left // batch.num_tokens)
            self._tokens_left -= num_layers * batch.num_tokens
        try:
            for vectors in itertools.islice(batch.by_layer, num_layers):
                if vectors is not None:
                    batch.results = [self._with_vectors(batch.items, vectors)]
                    return True
        except Exception:  # it is told, and pinned on whose fault it is, when the batch is computed again
            self._recover()
            return True
        return False

    def _finish(self, batch: _Batch) -> list[Embedded]:
        self._batch = None
        results, failures = batch.results, list[tuple[Item, str]]()
        if not results:
            results, failures = execute_isolated(self._embed, self._recover, batch.items)
        done = [answer for item, problem in failures for answer in self._fail(item, problem)]
        for item, vector in itertools.chain.from_iterable(results):
            done += self._take(item, vector)
        return done

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
