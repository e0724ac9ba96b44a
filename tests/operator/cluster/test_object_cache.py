from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmservice_operator.api.resource import KIND
from llmservice_operator.cluster.object_cache import ObjectCache, collect_seldom, freeze_heap

LABELS = {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/instance": "tiny"}


def thing(name: str = "tiny", version: int = 1, uid: str = "a", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team-a", "uid": uid, "resourceVersion": str(version), "labels": LABELS}
    return {"metadata": metadata, **more}


@pytest.fixture
def cache() -> ObjectCache:
    return ObjectCache()


def test_services_with_an_unprocessed_edit_come_first(cache: ObjectCache) -> None:
    for name, generation, observed in (("old", 2, 2), ("edited", 3, 2), ("newer", 1, 1), ("fresh", 1, None)):
        service = thing(name, uid=name, status={} if observed is None else {"observedGeneration": observed})
        service["metadata"]["generation"] = generation
        cache.put("LLMService", service)

    assert [name for _, name in cache.services()] == ["edited", "fresh", "old", "newer"]


def test_a_newer_state_replaces_an_older_one_and_not_the_other_way_round(cache: ObjectCache) -> None:
    assert cache.put("Deployment", thing(version=2))
    assert not cache.put("Deployment", thing(version=2))
    assert not cache.put("Deployment", thing(version=1))
    assert cache.put("Deployment", thing(version=10))  # as numbers: "10" < "2" as text

    live = cache.child("Deployment", "team-a", "tiny")
    assert live is not None
    assert live["metadata"]["resourceVersion"] == "10"


def test_a_late_answer_does_not_restore_a_deleted_object(cache: ObjectCache) -> None:
    cache.put("Deployment", thing(version=2))
    assert cache.drop("Deployment", thing(version=5))

    assert not cache.put("Deployment", thing(version=4))
    assert cache.child("Deployment", "team-a", "tiny") is None


def test_an_object_that_gets_its_labels_back_is_cached_again(cache: ObjectCache) -> None:
    cache.put("Deployment", thing(version=2))
    cache.drop("Deployment", thing(version=5))

    assert cache.put("Deployment", thing(version=6))


def test_a_late_deletion_event_does_not_remove_a_newer_state(cache: ObjectCache) -> None:
    cache.put("Deployment", thing(version=6))

    assert not cache.drop("Deployment", thing(version=5))
    assert cache.child("Deployment", "team-a", "tiny") is not None


def test_the_deletion_of_a_predecessor_leaves_the_successor(cache: ObjectCache) -> None:
    cache.put("Deployment", thing(version=3, uid="old"))
    assert cache.put("Deployment", thing(version=7, uid="new"))

    assert not cache.drop("Deployment", thing(version=6, uid="old"))
    assert cache.child("Deployment", "team-a", "tiny") is not None


def test_pods_are_found_by_the_service_whose_labels_they_carry(cache: ObjectCache) -> None:
    cache.put("Pod", thing("tiny-2"))
    cache.put("Pod", thing("tiny-1", uid="b"))
    other = thing("stranger", uid="c")
    other["metadata"]["labels"] = {"app.kubernetes.io/instance": "tiny"}
    cache.put("Pod", other)
    assert [pod["metadata"]["name"] for pod in cache.pods("team-a", "tiny")] == ["tiny-1", "tiny-2"]

    cache.drop("Pod", thing("tiny-1", version=2, uid="b"))
    assert [pod["metadata"]["name"] for pod in cache.pods("team-a", "tiny")] == ["tiny-2"]
    assert cache.pods("team-b", "tiny") == []


def test_unused_fields_are_not_kept(cache: ObjectCache) -> None:
    ports = [{"name": "metrics", "containerPort": 8001}]
    containers = [{"name": "server", "image": "i", "ports": ports}, {"name": "sidecar", "image": "i"}]
    pod = thing("tiny-1", spec={"nodeName": "n", "containers": containers}, status={"phase": "Running"})
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    cache.put("Pod", pod)

    (kept,) = cache.pods("team-a", "tiny")
    assert kept["spec"] == {"nodeName": "n", "containers": [{"name": "server", "ports": ports}]}
    assert kept["status"] == {"phase": "Running"}
    assert "managedFields" not in kept["metadata"]


def test_equal_parts_of_objects_are_kept_once(cache: ObjectCache) -> None:
    for name in ("one", "two"):
        containers = [{"name": "server", "args": ["--port", "8000"], "env": [{"name": "NAME", "value": name}]}]
        cache.put(
            "Deployment", thing(name, uid=name, spec={"strategy": {"type": "Recreate"}, "containers": containers})
        )

    first, second = (cache.child("Deployment", "team-a", name) for name in ("one", "two"))
    assert first is not None
    assert second is not None
    assert first["spec"]["strategy"] is second["spec"]["strategy"]
    (one,), (two,) = first["spec"]["containers"], second["spec"]["containers"]
    assert one["args"] is two["args"]
    assert (one["env"], two["env"]) == ([{"name": "NAME", "value": "one"}], [{"name": "NAME", "value": "two"}])


SCALARS = st.none() | st.booleans() | st.integers(0, 1) | st.sampled_from([0.0, 1.0, "", "a", "b" * 200])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner))


@example(specs=[1, True, 1.0, {"a": None}, {"b": None}])
@given(specs=st.lists(JSON, max_size=4))
def test_objects_are_kept_as_they_are_whatever_others_are_like(specs: list[Any]) -> None:
    """Compared as text: `1`, `1.0` and `True` are equal in Python."""
    cache = ObjectCache()
    for number, spec in enumerate(specs):
        cache.put("Deployment", thing(str(number), uid=str(number), spec=spec))

    for number, spec in enumerate(specs):
        kept = cache.child("Deployment", "team-a", str(number))
        assert kept is not None
        assert json.dumps(kept["spec"], sort_keys=True) == json.dumps(spec, sort_keys=True)


def test_a_listed_object_is_the_cached_one_unless_it_is_newer(cache: ObjectCache) -> None:
    cache.put("Service", thing(version=2))
    cached = cache.child("Service", "team-a", "tiny")

    for known in (thing(version=2), thing(version=1)):
        assert cache.latest("Service", known) is cached
    for new in (thing(version=3), thing(version=1, uid="b"), thing("other")):
        assert cache.latest("Service", new) is new


def test_a_list_returns_the_differences_and_keeps_newer_objects(cache: ObjectCache) -> None:
    for name, version in (("same", 1), ("older", 2), ("gone", 3), ("younger", 30)):
        cache.put("Service", thing(name, version, uid=name))
    listed = [thing("same", 1, uid="same"), thing("older", 9, uid="older"), thing("new", 5, uid="new")]
    assert not cache.follows("Service")

    changed = cache.replace("Service", None, listed, "20")

    assert sorted(one["metadata"]["name"] for one in changed) == ["gone", "new", "older"]
    assert cache.child("Service", "team-a", "gone") is None
    assert cache.child("Service", "team-a", "younger") is not None
    assert cache.follows("Service")


def test_a_list_of_one_namespace_does_not_affect_another(cache: ObjectCache) -> None:
    cache.put("Service", thing("tiny", 1))

    assert cache.replace("Service", "team-b", [], "20") == []
    assert len(cache) == 1


def test_a_bounded_number_of_deletions_is_remembered(cache: ObjectCache) -> None:
    for number in range(10_000):
        cache.put("Pod", thing(f"pod-{number}", 2, uid=str(number)))
        cache.drop("Pod", thing(f"pod-{number}", 3, uid=str(number)))

    assert len(cache) == 0
    assert len(cache._deleted) <= 4096
    assert cache._pods == {}


def test_a_bare_name_belongs_to_the_oldest_service_that_claims_it() -> None:
    def service(namespace: str, version: int, created: str, served: str | None = None) -> dict[str, Any]:
        metadata = {"name": "llama", "namespace": namespace, "uid": namespace, "resourceVersion": str(version)}
        spec = {"model": {"servedName": served} if served else {}}
        return {"metadata": {**metadata, "creationTimestamp": created}, "spec": spec}

    cache = ObjectCache()
    cache.put(KIND, service("b", 1, "2026-01-02T00:00:00Z"))
    assert cache.name_holder("llama") == "b"
    cache.put(KIND, service("a", 2, "2026-01-03T00:00:00Z"))
    assert cache.name_holder("llama") == "b"

    cache.put(KIND, service("b", 3, "2026-01-02T00:00:00Z", served="other"))
    assert (cache.name_holder("llama"), cache.name_holder("other")) == ("a", "b")
    cache.put(KIND, service("c", 4, "2026-01-01T00:00:00Z", served="a/llama"))
    assert cache.name_holder("a/llama") == "a", "a namespace with services"
    cache.drop(KIND, service("a", 5, "2026-01-03T00:00:00Z"))
    assert (cache.name_holder("llama"), cache.name_holder("a/llama")) == (None, "c")


class Node:
    """Two of them can refer to each other."""

    other: Node | None = None


def knot() -> weakref.ref[Node]:
    """An unreachable cycle, and a weak reference into it."""
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_live_objects_are_excluded_from_full_collections_and_garbage_is_not() -> None:
    kept, garbage = [{} for _ in range(1000)], knot()
    try:
        freeze_heap()
        assert garbage() is None
        assert gc.get_freeze_count() > len(kept)
        assert all(one is not kept for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_later_cycles_are_collected() -> None:
    try:
        freeze_heap()
        later = knot()
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()


def test_collections_are_rare_while_the_cache_fills() -> None:
    before, rounds = gc.get_threshold(), gc.get_stats()[0]["collections"]
    try:
        collect_seldom()
        kept = [{} for _ in range(10_000)]
        assert gc.get_stats()[0]["collections"] <= rounds + 1
        assert len(kept) == 10_000
    finally:
        gc.set_threshold(*before)
