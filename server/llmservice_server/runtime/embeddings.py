"""Embedding requests in, vectors out: in batches, computed between the steps of generating requests."""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.base import Attend, Model
from llmservice_server.backend.torch.attention import attend_otherwise
from llmservice_server.engine.engine import execute_isolated
from llmservice_server.runtime.vector_format import VectorFormat
from llmservice_server.types.messages import Embed, Embedded

_SHARE = 0.12
"""Of a step's time, so that the time between two tokens grows by less than a fifth."""
_LEAST_ROWS = 16
"""Tokens that are computed at once however little that is: fewer would read a layer's weights for nothing."""
_WEIGHT = 0.2  # of a new measurement
_MAX_BATCH_SIZE = 64


class PaddedAttention:
    """Implements `Attend` for `num_sequences` rows of `length` tokens, padded at their end.

    A query sees only what comes before it, so padding at the end needs no mask: no real token ever sees it. `windows`
    holds each layer's sliding window, or None.
    """

    def __init__(
        self,
        num_sequences: int,
        length: int,
        windows: Sequence[int | None],
        device: torch.device,
        softcap: float | None = None,
    ) -> None:
        self._rows = (num_sequences, length)
        self._softcap = softcap
        self._masks: dict[int | None, torch.Tensor] = {
            window: _mask(length, length, window, device)
            for window in {*windows}
            if window is not None and window < length
        }
        self._windows = windows

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        queries, key_values = (each.view(*self._rows, *each.shape[1:]) for each in (query, key_value))
        mask = self._masks.get(self._windows[layer])
        return _attended(queries, key_values, mask, self._softcap, sinks)


class PiecewiseAttention:
    """Implements `Attend` for one sequence of which each layer is computed some tokens at a time, in their order."""

    def __init__(self, windows: Sequence[int | None], softcap: float | None = None) -> None:
        self._windows = windows
        self._softcap = softcap
        self._layer = -1
        self._stored: list[torch.Tensor] = []  # keys and values of the layer's tokens so far

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layer != self._layer:
            self._layer, self._stored = layer, []
        self._stored.append(key_value)
        seen = torch.cat(self._stored)
        mask = _mask(len(query), len(seen), self._windows[layer], seen.device)
        return _attended(query[None], seen[None], mask, self._softcap, sinks)


def _attended(
    queries: torch.Tensor,
    key_values: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`[all queries, num_heads * head_dim]`. mask: `[num_queries, num_keys]`; None: each query sees those before it.

    queries: `[num_sequences, num_queries, num_heads, head_dim]`. key_values: `[num_sequences, num_keys, 2 *
    num_kv_heads, head_dim]`.
    """
    by_head, (keys, values) = queries.transpose(1, 2), key_values.transpose(1, 2).chunk(2, dim=1)
    if softcap is None and sinks is None:
        answer = F.scaled_dot_product_attention(
            by_head, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
    else:
        mask = _mask(queries.shape[1], keys.shape[2], None, queries.device) if mask is None else mask
        answer = attend_otherwise(by_head, keys, values, mask, softcap=softcap, sinks=sinks)
    return answer.transpose(1, 2).flatten(2).flatten(0, 1)


def _mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a query may see a key, `[num_queries, num_keys]`; the queries are those of the last keys."""
    places = torch.arange(num_keys, device=device)
    distance = places[num_keys - num_queries :, None] - places
    return (distance >= 0) & (distance < (num_keys if window is None else window))


class VectorModel(Protocol):
    """Computes a vector of each input: an embedding, or the logits of a cross-encoder.

    `type_ids` says of each token which text of a pair it belongs to; empty where there are no pairs.
    """

    @property
    def size(self) -> int:
        """Numbers in a vector."""

    @property
    def takes_pairs(self) -> bool: ...

    def embed(self, inputs: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Float32, `[num_inputs, size]`, on the CPU; inputs are padded to the longest."""

    def embed_by_piece(
        self, inputs: Sequence[Sequence[int]], rows: int | None = None, type_ids: Sequence[Sequence[int]] = ()
    ) -> Iterator[torch.Tensor | None]:
        """Yields None after each piece of the work, `rows` tokens of a single input; then what `embed` returns."""


class EmbeddingModel:
    """Shares the generating model's weights."""

    def __init__(self, model: Model, vector_format: VectorFormat) -> None:
        self._model = model
        self._format = vector_format
        self.takes_pairs = False

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self._format.size

    def embed(self, inputs: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        *_, vectors = self.embed_by_piece(inputs)
        assert vectors is not None  # noqa: S101  # the last ones are
        return vectors

    @torch.inference_mode()
    def embed_by_piece(
        self, inputs: Sequence[Sequence[int]], rows: int | None = None, type_ids: Sequence[Sequence[int]] = ()
    ) -> Iterator[torch.Tensor | None]:
        """Yields None after each layer, or of a single input after `rows` tokens of one; then what `embed` returns."""
        model, longest = self._model, max(map(len, inputs))
        padded = [[*ids, *([0] * (longest - len(ids)))] for ids in inputs]
        windows, softcap = model.config.windows, model.config.softcap
        attend: Attend = PiecewiseAttention(windows, softcap)
        if rows is None or len(inputs) > 1:
            rows, attend = None, PaddedAttention(len(inputs), longest, windows, model.device, softcap)
        token_ids = torch.tensor(padded, device=model.device).flatten()
        positions = torch.arange(longest, device=model.device).repeat(len(inputs))
        for states in model.forward_by_piece(token_ids, positions, attend, rows):
            if states is None:
                yield None
            else:
                normed = model.norm_states(states).view(len(inputs), longest, -1)
                yield self._format.vectors(normed, [len(ids) for ids in inputs]).cpu()


class Pace:
    """Measures what a token of one layer costs, and accumulates credit for pieces that exceed a step's share."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._row_s: float | None = None
        self._credit_s = 0.0

    def rows(self, max_tokens: int) -> int:
        """The tokens of a piece: what a step leaves, or what fits its share where that is less."""
        if self._step_s is not None:
            affordable = 0.0 if self._row_s is None else _SHARE * self._step_s / self._row_s
            max_tokens = min(max_tokens, int(affordable))
        return max(max_tokens, _LEAST_ROWS)

    def add_step(self, step_s: float) -> None:
        """A step took so long: its share is added to the credit."""
        self._step_s = _smoothed(self._step_s, step_s)
        self._credit_s += _SHARE * self._step_s

    def allows(self, num_tokens: int) -> bool:
        """Whether a piece of so many tokens may be computed now. Where no step was measured it always may."""
        return self._step_s is None or self._credit_s >= num_tokens * (self._row_s or 0.0)

    def add_piece(self, num_tokens: int, seconds: float) -> None:
        """A piece took so long. Credit that it left is dropped, what it exceeded it by is carried over."""
        self._row_s = _smoothed(self._row_s, seconds / num_tokens)
        self._credit_s = min(0.0, self._credit_s - seconds)


def _smoothed(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)


@dataclass(frozen=True, slots=True)
class Item:
    """One input of one request."""

    request_id: str
    index: int  # of the input in its request
    token_ids: list[int]
    queued_s: float
    type_ids: list[int] | None = None  # of a pair
    client: str | None = None  # who shares the model equally with others
    turn: int = 0  # the smallest is computed first; `Batcher` sets it


class Batcher:
    """Buckets by length, each twice as long as the one before, so that padding at most doubles the work.

    A batch is due when its bucket fills one, or when the bucket's oldest item has waited `window_s`. Time is passed in.

    Clients get equal shares of tokens by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): an item's turn is
    the tokens that its client has queued before it, counted from the turn that was computed last where that is later.
    """

    def __init__(self, *, window_s: float, max_batch_tokens: int, max_batch_size: int) -> None:
        """`max_batch_tokens` bounds a batch as it is computed, padding included."""
        self._window_s = window_s
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_size = max_batch_size
        self._buckets: dict[int, list[Item]] = {}  # in the order of their turns
        self._turn = 0  # the latest of those computed
        self._next_turn: dict[str | None, int] = {}  # of each client

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            turn = max(self._turn, self._next_turn.get(item.client, 0))
            self._next_turn[item.client] = turn + len(item.token_ids)
            insort(self._buckets.setdefault(_bucket(item), []), replace(item, turn=turn), key=_TURN)

    def remove(self, request_id: str) -> None:
        """Forget a request's items, which its client gets back; an unknown id is no error."""
        for bucket, items in list(self._buckets.items()):
            for item in items:
                if item.request_id == request_id and item.client in self._next_turn:
                    self._next_turn[item.client] -= len(item.token_ids)
            self._keep(bucket, [item for item in items if item.request_id != request_id])

    def due_s(self) -> float | None:
        """When the next batch is due, long ago for a full one; None where nothing waits."""
        return min(map(self._due_s, self._buckets), default=None)

    def take(self, now: float, max_tokens: int | None = None) -> list[Item]:
        """The due batch whose turn it is, or nothing. `max_tokens` cuts it further, but for its first item."""
        due = [bucket for bucket in self._buckets if self._due_s(bucket) <= now]
        if not due:
            return []
        bucket = min(due, key=lambda bucket: self._buckets[bucket][0].turn)
        items = self._buckets[bucket]
        size = self._batch_size(items, max_tokens)
        batch, left = items[:size], items[size:]
        self._turn = max(self._turn, batch[-1].turn)
        self._next_turn = {client: turn for client, turn in self._next_turn.items() if turn > self._turn}
        self._keep(bucket, left)
        return batch

    def _due_s(self, bucket: int) -> float:
        items = self._buckets[bucket]
        if len(items) >= self._max_batch_size or len(items) << bucket > self._max_batch_tokens:
            return items[0].queued_s
        return min(item.queued_s for item in items) + self._window_s

    def _batch_size(self, items: Iterable[Item], max_tokens: int | None) -> int:
        """How many, from the first on, may be computed together; at least one."""
        most = self._max_batch_tokens if max_tokens is None else min(max_tokens, self._max_batch_tokens)
        size = longest = 0
        for item in items:
            longest = max(longest, len(item.token_ids))
            if size == self._max_batch_size or (size and (size + 1) * longest > most):
                break
            size += 1
        return size

    def _keep(self, bucket: int, items: list[Item]) -> None:
        if items:
            self._buckets[bucket] = items
        else:
            del self._buckets[bucket]


_TURN = attrgetter("turn")


def _bucket(item: Item) -> int:
    """`b` for lengths above 2 ** (b - 1) and up to 2 ** b."""
    return (len(item.token_ids) - 1).bit_length()


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
