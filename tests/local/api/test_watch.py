from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from llmservice_local.api.registry import MERGE_PATCH, DeleteOptions, Registry, WriteOptions
from llmservice_local.api.watch import WatchRequest, watch
from llmservice_local.selector import label_predicate
from llmservice_operator.api.crd import crd

OPTIONS = WriteOptions()


@pytest.fixture
def registry() -> Registry:
    return Registry()


def request(registry: Registry, selector: str = "", since: int | None = None, **more: Any) -> WatchRequest:
    kind = registry.kinds.find("", "v1", "configmaps")
    return WatchRequest(kind, "default", label_predicate(selector), since, timeout_s=30.0, **more)


def create(registry: Registry, name: str, **labels: str) -> None:
    kind = registry.kinds.find("", "v1", "configmaps")
    registry.create(kind, "default", {"metadata": {"name": name, "labels": labels}}, OPTIONS)


async def take(events: AsyncIterator[dict[str, Any]], count: int) -> list[tuple[str, str]]:
    found = []
    for _ in range(count):
        event = await anext(events)
        found.append((event["type"], event["object"]["metadata"].get("name", "")))
    return found


async def test_watch_without_a_version_begins_with_what_exists(registry: Registry) -> None:
    create(registry, "a")
    create(registry, "b")
    events = watch(registry, request(registry), lambda: 0.0)
    assert await take(events, 2) == [("ADDED", "a"), ("ADDED", "b")]


async def test_watch_from_a_version_brings_only_what_came_after(registry: Registry) -> None:
    create(registry, "a")
    since = registry.store.revision
    create(registry, "b")
    events = watch(registry, request(registry, since=since), lambda: 0.0)
    assert await take(events, 1) == [("ADDED", "b")]


async def test_what_enters_the_selector_is_added_and_what_leaves_it_deleted(registry: Registry) -> None:
    kind = registry.kinds.find("", "v1", "configmaps")
    since = registry.store.revision
    create(registry, "a")
    for value in ("yes", "no"):
        patch = {"metadata": {"labels": {"on": value}}}
        registry.patch(kind, "default", "a", patch, MERGE_PATCH, OPTIONS)
    registry.delete(kind, "default", "a", DeleteOptions())
    events = watch(registry, request(registry, "on=yes", since), lambda: 0.0)
    assert await take(events, 2) == [("ADDED", "a"), ("DELETED", "a")]


async def test_deleted_object_carries_the_version_of_its_deletion(registry: Registry) -> None:
    kind = registry.kinds.find("", "v1", "configmaps")
    create(registry, "a")
    since = registry.store.revision
    registry.delete(kind, "default", "a", DeleteOptions())
    event = await anext(watch(registry, request(registry, since=since), lambda: 0.0))
    assert event["type"] == "DELETED"
    assert event["object"]["metadata"]["resourceVersion"] == str(registry.store.revision)


async def test_streaming_list_ends_with_a_bookmark_that_says_so(registry: Registry) -> None:
    create(registry, "a")
    events = watch(registry, request(registry, initial_events=True, bookmarks=True), lambda: 0.0)
    assert await take(events, 1) == [("ADDED", "a")]
    bookmark = await anext(events)
    assert bookmark["type"] == "BOOKMARK"
    assert bookmark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


async def test_watch_from_a_forgotten_version_is_an_error_event(registry: Registry) -> None:
    registry.store.__init__(history=2)  # type: ignore[misc]  # a store that has forgotten its beginning
    for revision in range(5):
        registry.store.put(("", "x"), {"metadata": {"name": str(revision)}})
    event = await anext(watch(registry, request(registry, since=1), lambda: 0.0))
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")


async def test_watch_ends_with_its_time(registry: Registry) -> None:
    moments = iter([0.0, 31.0])
    events = [event async for event in watch(registry, request(registry), lambda: next(moments))]
    assert events == []


async def test_a_watch_ends_where_its_crd_goes_or_changes(registry: Registry) -> None:
    definitions = registry.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    name = crd()["metadata"]["name"]

    def begin() -> AsyncIterator[dict[str, Any]]:
        kind = registry.kinds.find("serving.llmservice.io", "v1alpha1", "llmservices")
        since = registry.store.revision
        return watch(registry, WatchRequest(kind, None, label_predicate(""), since, timeout_s=30.0), lambda: 0.0)

    registry.create(definitions, "", crd(), OPTIONS)
    first = begin()
    registry.patch(definitions, "", name, {"metadata": {"labels": {"team": "a"}}}, MERGE_PATCH, OPTIONS)
    registry.patch(definitions, "", name, {"spec": {"names": {"shortNames": ["other"]}}}, MERGE_PATCH, OPTIONS)
    assert [event async for event in first] == []
    second = begin()
    registry.delete(definitions, "", name, DeleteOptions())
    assert [event async for event in second] == []
