"""Embedding requests in, vectors out, one batch at a time, between the steps of those who generate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from llmservice_server.embedding.batcher import Batcher, Item
from llmservice_server.embedding.model import EmbeddingModel
from llmservice_server.messages import Embed, Embedded

_LOG = logging.getLogger(__name__)
_MAX_BATCH_SIZE = 64


@dataclass(slots=True)
class _Waiting:
    vectors: list[bytes]  # empty where an input is not computed yet
    num_missing: int


class Embedder:
    """Refuses what it can never serve, and answers for what fails, so that the engine lives on."""

    def __init__(
        self, model: EmbeddingModel, *, vocab_size: int, max_tokens: int, max_batch_tokens: int, window_s: float
    ) -> None:
        """`max_tokens`: of one input. `max_batch_tokens`: of one forward pass, padding included."""
        self._model = model
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
        try:
            vectors = self._model.embed([item.token_ids for item in batch])
        except RuntimeError as error:  # torch's, out of memory included: it concerns this batch only
            _LOG.exception("an embedding batch of %d inputs failed", len(batch))
            return self._fail({item.request_id for item in batch}, f"the embedding failed: {error}")
        broken = {batch[row].request_id for row in (~vectors.isfinite().all(dim=1)).nonzero().flatten().tolist()}
        done = self._fail(broken, "the model's states are not finite: the weights or the dtype overflow")
        for item, vector in zip(batch, vectors.numpy().astype("<f4", copy=False), strict=True):
            if item.request_id not in broken:
                done += self._take(item, vector.tobytes())
        return done

    def _take(self, item: Item, vector: bytes) -> list[Embedded]:
        waiting = self._waiting[item.request_id]
        waiting.vectors[item.index] = vector
        waiting.num_missing -= 1
        if waiting.num_missing:
            return []
        del self._waiting[item.request_id]
        return [Embedded(request_id=item.request_id, vectors=waiting.vectors)]

    def _fail(self, request_ids: set[str], error: str) -> list[Embedded]:
        self.abort(sorted(request_ids))
        return [Embedded(request_id=request_id, error=error) for request_id in sorted(request_ids)]

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
