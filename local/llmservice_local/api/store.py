"""The stored objects with their revisions and their history; it takes the place of etcd."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from llmservice_local.errors import gone
from llmservice_local.objects import Object

Collection = tuple[str, str]
HISTORY = 10_000
"""Number of changes that a watch can resume from; older resource versions get 410, as after etcd's compaction."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write. `before` is None for a creation, `after` for a deletion, whose last state is `final`."""

    revision: int
    collection: Collection
    before: Object | None
    after: Object | None
    final: Object | None = None


class Store:
    """Objects by collection, namespace and name. Stored objects are immutable: callers copy before they change one."""

    def __init__(self, history: int = HISTORY) -> None:
        self._objects: dict[Collection, dict[tuple[str, str], Object]] = {}
        self._history: deque[Change] = deque(maxlen=history)
        self._subscribers: set[asyncio.Queue[Change]] = set()
        self.revision = 1

    def get(self, collection: Collection, namespace: str, name: str) -> Object | None:
        return self._objects.get(collection, {}).get((namespace, name))

    def list(self, collection: Collection, namespace: str | None = None) -> Iterator[Object]:
        """The collection's objects, sorted by namespace and name; of all namespaces if `namespace` is None."""
        objects = self._objects.get(collection, {})
        for key in sorted(objects):
            if namespace is None or key[0] == namespace:
                yield objects[key]

    def put(self, collection: Collection, obj: Object) -> Object:
        """Write an object at the next revision, which becomes its resourceVersion; returns what is stored."""
        key = self._key(obj)
        before = self._objects.get(collection, {}).get(key)
        stored = self._stamped(obj)
        self._objects.setdefault(collection, {})[key] = stored
        self._publish(Change(self.revision, collection, before, stored))
        return stored

    def remove(self, collection: Collection, namespace: str, name: str) -> Object:
        """Delete an object; watchers receive its last state with a new resourceVersion."""
        before = self._objects[collection].pop((namespace, name))
        final = self._stamped(before)
        self._publish(Change(self.revision, collection, before, None, final))
        return final

    def convert(self, collection: Collection, decode: Callable[[Object], Object]) -> None:
        """Convert every object to a new schema; watches report no change."""
        objects = self._objects.get(collection, {})
        objects.update({key: decode(obj) for key, obj in objects.items()})

    def copy(self) -> Store:
        """An independent copy of objects, history and revision, without watchers."""
        copied = Store(self._history.maxlen or HISTORY)
        copied._objects = {collection: dict(objects) for collection, objects in self._objects.items()}
        copied._history.extend(self._history)
        copied.revision = self.revision
        return copied

    @asynccontextmanager
    async def changes(self, since: int) -> AsyncIterator[asyncio.Queue[Change]]:
        """A queue of all changes after revision `since`; raises `ApiError` 410 if the history is shorter."""
        if self._history and since < self._history[0].revision - 1 and len(self._history) == self._history.maxlen:
            raise gone(f"too old resource version: {since} ({self._history[0].revision})")
        queue: asyncio.Queue[Change] = asyncio.Queue()
        for change in self._history:
            if change.revision > since:
                queue.put_nowait(change)
        self._subscribers.add(queue)
        try:
            yield queue
        finally:
            self._subscribers.discard(queue)

    def _stamped(self, obj: Object) -> Object:
        self.revision += 1
        return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.revision)}}

    def _publish(self, change: Change) -> None:
        self._history.append(change)
        for queue in self._subscribers:
            queue.put_nowait(change)

    @staticmethod
    def _key(obj: Object) -> tuple[str, str]:
        metadata = obj["metadata"]
        return metadata.get("namespace", ""), metadata["name"]
