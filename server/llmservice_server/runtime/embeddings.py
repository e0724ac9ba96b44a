"""Embedding requests in, vectors out: in batches, computed between the steps of generating requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llmservice_server.engine.engine import execute_isolated
from llmservice_server.runtime.embedding_batches import Batcher, Item, Pace
from llmservice_server.runtime.embedding_model import VectorModel
from llmservice_server.types.messages import Embed, Embedded

_MAX_BATCH_SIZE = 64


@dataclass(slots=True)
class _Waiting:
    vectors: list[bytes]  # empty where an input is not computed yet
    num_missing: int


@dataclass(slots=True)
class _Batch:
    """One that is being computed."""

    items: list[Item]
    by_piece: Iterator[torch.Tensor | None]  # None after each piece, the vectors at the end
    piece_tokens: int  # of a piece at most, padding included
    results: list[list[tuple[Item, np.ndarray]]] = field(default_factory=list)  # empty where it has failed


class BatchEmbedder:
    """Implements `Embedder`. Refuses what it can never serve; what fails is answered with an error."""

    def __init__(
        self,
        model: VectorModel,
        recover: Callable[[], None],
        *,
        vocab_size: int,
        max_tokens: int,
        max_batch_tokens: int,
        window_s: float,
        max_batch_size: int = _MAX_BATCH_SIZE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_tokens`: of one input. `max_batch_tokens`: of one forward pass, padding included.

        `recover` makes the device usable after an exception, and raises where it is lost.
        """
        self._model = model
        self._recover = recover
        self._vocab_size = vocab_size
        self.max_tokens = max_tokens
        self._batcher = Batcher(window_s=window_s, max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size)
        self._waiting: dict[str, _Waiting] = {}
        self._batch: _Batch | None = None
        self._tokens_left = 0  # by the steps so far, which no piece has used
        self._pace = Pace()
        self._clock = clock

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self._model.size

    @property
    def num_waiting(self) -> int:
        """Inputs that are not computed yet."""
        return sum(waiting.num_missing for waiting in self._waiting.values())

    def add(self, message: Embed, now: float) -> Embedded | None:
        """Queue a request; returns the answer to one that is refused."""
        if (problem := self._why_refused(message)) is not None:
            return Embedded(request_id=message.request_id, error=problem, error_status=400)
        self._waiting[message.request_id] = _Waiting([b""] * len(message.inputs), len(message.inputs))
        type_ids: Sequence[list[int] | None] = message.type_ids or [None] * len(message.inputs)
        inputs = zip(message.inputs, type_ids, strict=True)
        self._batcher.add(
            Item(message.request_id, index, ids, now, types, message.client)
            for index, (ids, types) in enumerate(inputs)
        )
        return None

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None:
                self._batcher.remove(request_id)

    def due_s(self) -> float | None:
        """When `step` has something to do; None where nothing waits."""
        return self._batcher.due_s() if self._batch is None else 0.0

    def step(self, now: float, max_tokens: int | None = None, step_s: float | None = None) -> list[Embedded]:
        """Compute the batch that is due, if there is one; returns the requests that it completes.

        `max_tokens`: that the step of the generating requests leaves; None: there are none. `step_s`: what it took. A
        batch is cut to what they allow and computed layer by layer between the steps, and a single input that is longer
        in pieces of so many tokens.
        """
        if step_s is not None:
            self._pace.add_step(step_s)
        if self._batch is None:
            rows = None if max_tokens is None else self._pace.rows(max_tokens)
            items = self._batcher.take(now, rows)
            if not items:
                return []
            self._batch = self._begin(items, rows)
            self._tokens_left = 0
        return self._finish(self._batch) if self._compute(self._batch, max_tokens) else []

    def _begin(self, items: list[Item], rows: int | None) -> _Batch:
        inputs = [item.token_ids for item in items]
        num_tokens = len(inputs) * max(map(len, inputs))
        rows = None if rows is None or len(inputs) > 1 else min(num_tokens, rows)
        return _Batch(items, self._model.embed_by_piece(inputs, rows, _type_ids(items)), rows or num_tokens)

    def _embed(self, batch: list[Item]) -> list[tuple[Item, np.ndarray]]:
        return self._with_vectors(batch, self._model.embed([item.token_ids for item in batch], _type_ids(batch)))

    def _with_vectors(self, batch: list[Item], vectors: torch.Tensor) -> list[tuple[Item, np.ndarray]]:
        return list(zip(batch, vectors.numpy().astype("<f4", copy=False), strict=True))

    def _compute(self, batch: _Batch, max_tokens: int | None) -> bool:
        """Compute a piece where one may be, all of them where none generates; True at the end, or after a failure."""
        if max_tokens is not None:
            self._tokens_left += max_tokens
            if self._tokens_left < batch.piece_tokens or not self._pace.allows(batch.piece_tokens):
                return False
            self._tokens_left -= batch.piece_tokens
        began_s = self._clock()
        try:
            for vectors in batch.by_piece:
                if vectors is not None:
                    batch.results = [self._with_vectors(batch.items, vectors)]
                    return True
                if max_tokens is not None:
                    break
        except Exception:  # logged and attributed to its input when the batch is computed again
            self._recover()
            return True
        self._pace.add_piece(batch.piece_tokens, self._clock() - began_s)
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
        if message.type_ids and not self._model.takes_pairs:
            return "the inputs are pairs of texts, expected single ones: this model is no cross-encoder"
        return None


def _type_ids(items: Sequence[Item]) -> list[list[int]]:
    """Empty where an item is no pair."""
    return [item.type_ids for item in items if item.type_ids is not None]
