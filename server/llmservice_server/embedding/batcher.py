"""Dynamic batching: inputs of like length wait for each other, but never longer than a time window."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One input of one request."""

    request_id: str
    index: int  # of the input in its request
    token_ids: list[int]
    queued_s: float


class Batcher:
    """Buckets by length, each twice as long as the one before, so that padding at most doubles the work.

    A batch is due when its bucket fills one, or when the bucket's oldest item has waited `window_s`. Time is passed in.
    """

    def __init__(self, *, window_s: float, max_batch_tokens: int, max_batch_size: int) -> None:
        """`max_batch_tokens` bounds a batch as it is computed, padding included."""
        self._window_s = window_s
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_size = max_batch_size
        self._buckets: dict[int, deque[Item]] = {}

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            self._buckets.setdefault(_bucket(item), deque()).append(item)

    def remove(self, request_id: str) -> None:
        """Forget a request's items; an unknown id is no error."""
        for bucket, items in list(self._buckets.items()):
            self._keep(bucket, deque(item for item in items if item.request_id != request_id))

    def due_s(self) -> float | None:
        """When the next batch is due, long ago for a full one; None where nothing waits."""
        return min(map(self._due_s, self._buckets), default=None)

    def take(self, now: float, max_tokens: int | None = None) -> list[Item]:
        """The due batch that has waited longest, or nothing. `max_tokens` cuts it further, but for its first item."""
        due = [bucket for bucket in self._buckets if self._due_s(bucket) <= now]
        if not due:
            return []
        bucket = min(due, key=lambda bucket: self._buckets[bucket][0].queued_s)
        items = self._buckets[bucket]
        batch = [items.popleft() for _ in range(self._batch_size(items, max_tokens))]
        self._keep(bucket, items)
        return batch

    def _due_s(self, bucket: int) -> float:
        items = self._buckets[bucket]
        full = len(items) >= self._max_batch_size or len(items) << bucket > self._max_batch_tokens
        return items[0].queued_s + (0.0 if full else self._window_s)

    def _batch_size(self, items: Iterable[Item], max_tokens: int | None) -> int:
        """How many, from the oldest on, may be computed together; at least one."""
        most = self._max_batch_tokens if max_tokens is None else min(max_tokens, self._max_batch_tokens)
        size = longest = 0
        for item in items:
            longest = max(longest, len(item.token_ids))
            if size == self._max_batch_size or (size and (size + 1) * longest > most):
                break
            size += 1
        return size

    def _keep(self, bucket: int, items: deque[Item]) -> None:
        if items:
            self._buckets[bucket] = items
        else:
            del self._buckets[bucket]


def _bucket(item: Item) -> int:
    """`b` for lengths above 2 ** (b - 1) and up to 2 ** b."""
    return (len(item.token_ids) - 1).bit_length()
