"""Watches of a collection: the changes since a resource version as watch events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from llmservice_local.api.registry import Registry
from llmservice_local.api.store import Change
from llmservice_local.errors import ApiError
from llmservice_local.kinds.catalogue import Kind
from llmservice_local.objects import Object
from llmservice_local.selector import Predicate

BOOKMARK_S = 30.0
_DEFINITIONS = ("apiextensions.k8s.io", "customresourcedefinitions")


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """The parameters of a watch; with `since` None it starts with ADDED events for the existing objects."""

    kind: Kind
    namespace: str | None
    selects: Predicate
    since: int | None
    timeout_s: float
    bookmarks: bool = False
    initial_events: bool = False


async def watch(registry: Registry, request: WatchRequest, now: Callable[[], float]) -> AsyncIterator[Object]:
    """The events, until `timeout_s` has passed or the CRD of the kind has changed or been deleted.

    An object that the selector no longer matches gets a DELETED event, as upstream.
    """
    kind = request.kind
    since = registry.store.revision if request.since is None else request.since
    deadline = now() + request.timeout_s
    try:
        async with registry.store.changes(since) as changes:
            if request.since is None or request.initial_events:
                for obj in registry.store.list(kind.collection, request.namespace):
                    if request.selects(obj):
                        yield {"type": "ADDED", "object": registry.present(kind, obj)}
            if request.initial_events:
                yield _bookmark(kind, registry.store.revision, end_of_initial=True)
            while (left := deadline - now()) > 0:
                try:
                    async with asyncio.timeout(min(left, BOOKMARK_S)):
                        change = await changes.get()
                except TimeoutError:
                    if request.bookmarks:
                        yield _bookmark(kind, registry.store.revision)
                    continue
                event = _event(registry, request, change)
                if event is not None:
                    yield event
                if change.collection == _DEFINITIONS and kind not in registry.kinds:
                    return
    except ApiError as error:
        yield {"type": "ERROR", "object": error.status()}


def _event(registry: Registry, request: WatchRequest, change: Change) -> Object | None:
    if change.collection != request.kind.collection:
        return None
    subject = change.after or change.before
    if subject is None or request.namespace not in {None, subject["metadata"].get("namespace", "")}:
        return None
    was = change.before is not None and request.selects(change.before)
    is_now = change.after is not None and request.selects(change.after)
    if is_now and change.after is not None:
        return {"type": "MODIFIED" if was else "ADDED", "object": registry.present(request.kind, change.after)}
    if was and change.before is not None:
        last = change.final or change.before
        last = {**last, "metadata": {**last["metadata"], "resourceVersion": str(change.revision)}}
        return {"type": "DELETED", "object": registry.present(request.kind, last)}
    return None


def _bookmark(kind: Kind, revision: int, *, end_of_initial: bool = False) -> Object:
    metadata: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
    if end_of_initial:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    return {"type": "BOOKMARK", "object": {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata}}
