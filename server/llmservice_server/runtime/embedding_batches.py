"""Which inputs of embedding requests are computed together and when, beside the steps of generating requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

_SHARE = 0.12
"""Of a step's time, so that the time between two tokens grows by less than a fifth."""
_LEAST_ROWS = 16
"""Tokens that are computed at once however little that is: fewer would read a layer's weights for nothing."""
_WEIGHT = 0.2  # of a new measurement


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
