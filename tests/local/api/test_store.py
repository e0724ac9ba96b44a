from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.api.store import Store
from llmservice_local.errors import ApiError

PODS = ("", "pods")


def obj(name: str, namespace: str = "default", **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, **fields}


def test_every_write_gets_a_higher_resource_version() -> None:
    store = Store()
    first = store.put(PODS, obj("a"))
    second = store.put(PODS, obj("a", spec=1))
    removed = store.remove(PODS, "default", "a")
    versions = [int(found["metadata"]["resourceVersion"]) for found in (first, second, removed)]
    assert versions == sorted(set(versions))
    assert store.get(PODS, "default", "a") is None


def test_objects_are_listed_by_namespace_and_name() -> None:
    store = Store()
    for name, namespace in (("b", "y"), ("a", "y"), ("c", "x")):
        store.put(PODS, obj(name, namespace))
    assert [found["metadata"]["name"] for found in store.list(PODS)] == ["c", "a", "b"]
    assert [found["metadata"]["name"] for found in store.list(PODS, "y")] == ["a", "b"]


async def test_watcher_gets_past_and_future_changes() -> None:
    store = Store()
    seen = int(store.put(PODS, obj("a"))["metadata"]["resourceVersion"])
    store.put(PODS, obj("b"))
    async with store.changes(seen) as changes:
        store.remove(PODS, "default", "a")
        missed, new = changes.get_nowait(), changes.get_nowait()
    assert missed.after is not None
    assert missed.after["metadata"]["name"] == "b"
    assert new.after is None
    assert new.before is not None
    assert new.before["metadata"]["name"] == "a"


async def test_changes_older_than_the_history_are_expired() -> None:
    store = Store(history=2)
    for name in "abcd":
        store.put(PODS, obj(name))
    with pytest.raises(ApiError) as refused:
        async with store.changes(1):
            pass
    assert refused.value.code == 410
    async with store.changes(store.revision - 2) as changes:
        assert changes.qsize() == 2
