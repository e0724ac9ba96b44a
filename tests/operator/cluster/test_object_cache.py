from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.api.resource import KIND
from llmservice_operator.cluster.object_cache import ObjectCache

LABELS = {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/instance": "tiny"}


def thing(name: str = "tiny", version: int = 1, uid: str = "a", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team-a", "uid": uid, "resourceVersion": str(version), "labels": LABELS}
    return {"metadata": metadata, **more}


@pytest.fixture
def cache() -> ObjectCache:
    return ObjectCache()


def test_services_that_were_edited_while_nobody_worked_come_first(cache: ObjectCache) -> None:
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


def test_an_answer_that_comes_after_the_deletion_brings_nothing_back(cache: ObjectCache) -> None:
    cache.put("Deployment", thing(version=2))
    assert cache.drop("Deployment", thing(version=5))

    assert not cache.put("Deployment", thing(version=4))
    assert cache.child("Deployment", "team-a", "tiny") is None


def test_what_lost_its_labels_comes_back_with_them(cache: ObjectCache) -> None:
    cache.put("Deployment", thing(version=2))
    cache.drop("Deployment", thing(version=5))

    assert cache.put("Deployment", thing(version=6))


def test_a_late_deletion_does_not_take_what_was_written_after_it(cache: ObjectCache) -> None:
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


def test_what_nobody_reads_is_not_kept(cache: ObjectCache) -> None:
    ports = [{"name": "metrics", "containerPort": 8001}]
    containers = [{"name": "server", "image": "i", "ports": ports}, {"name": "sidecar", "image": "i"}]
    pod = thing("tiny-1", spec={"nodeName": "n", "containers": containers}, status={"phase": "Running"})
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    cache.put("Pod", pod)

    (kept,) = cache.pods("team-a", "tiny")
    assert kept["spec"] == {"nodeName": "n", "containers": [{"name": "server", "ports": ports}]}
    assert kept["status"] == {"phase": "Running"}
    assert "managedFields" not in kept["metadata"]


def test_a_list_tells_what_is_new_newer_and_gone_and_leaves_what_is_younger_than_it(cache: ObjectCache) -> None:
    for name, version in (("same", 1), ("older", 2), ("gone", 3), ("younger", 30)):
        cache.put("Service", thing(name, version, uid=name))
    listed = [thing("same", 1, uid="same"), thing("older", 9, uid="older"), thing("new", 5, uid="new")]
    assert not cache.follows("Service")

    changed = cache.replace("Service", None, listed, "20")

    assert sorted(one["metadata"]["name"] for one in changed) == ["gone", "new", "older"]
    assert cache.child("Service", "team-a", "gone") is None
    assert cache.child("Service", "team-a", "younger") is not None
    assert cache.follows("Service")


def test_a_list_of_one_namespace_says_nothing_of_another(cache: ObjectCache) -> None:
    cache.put("Service", thing("tiny", 1))

    assert cache.replace("Service", "team-b", [], "20") == []
    assert len(cache) == 1


def test_deletions_are_remembered_for_a_while_and_not_for_ever(cache: ObjectCache) -> None:
    for number in range(10_000):
        cache.put("Pod", thing(f"pod-{number}", 2, uid=str(number)))
        cache.drop("Pod", thing(f"pod-{number}", 3, uid=str(number)))

    assert len(cache) == 0
    assert len(cache._graves) <= 4096
    assert cache._pods == {}


def test_a_bare_name_belongs_to_the_oldest_service_until_that_gives_it_up() -> None:
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
