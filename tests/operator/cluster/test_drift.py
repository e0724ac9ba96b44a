from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api.kinds import CHILD_KINDS, Child
from llmservice_operator.api.resource import LLMService
from llmservice_operator.children.expected import expected_children
from llmservice_operator.cluster.drift import (
    APPLIED,
    ChildInputs,
    InSyncCache,
    covers,
    reason_to_apply,
    settled,
    stamped,
)
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.sizing import Sized

EXPECTED: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"name": "tiny", "namespace": "team-a", "labels": {"app.kubernetes.io/instance": "tiny"}},
    "spec": {"replicas": 2, "template": {"spec": {"containers": [{"name": "server", "args": ["serve"]}]}}},
}


def live(**metadata: Any) -> dict[str, Any]:
    """EXPECTED as the API server stores it: with defaults, and with a status."""
    made = copy.deepcopy(stamped(EXPECTED))
    made["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1, **metadata}
    made["spec"]["strategy"] = {"type": "RollingUpdate"}
    made["status"] = {"replicas": 2}
    return made


@pytest.mark.parametrize("restarted", [True, False])
def test_a_child_in_sync_is_not_applied(restarted: bool) -> None:
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(EXPECTED, live(resourceVersion="9"), known) is None


@pytest.mark.parametrize("restarted", [True, False])
def test_a_change_of_the_status_is_no_drift(restarted: bool) -> None:
    after = live(resourceVersion="9") | {"status": {"replicas": 1}}
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(EXPECTED, after, known) is None


@pytest.mark.parametrize("restarted", [True, False])
def test_an_edit_of_an_owned_field_by_another_client_is_drift(restarted: bool) -> None:
    after = live(resourceVersion="9")
    after["spec"]["replicas"] = 7
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(EXPECTED, after, known) == "touched"


@pytest.mark.parametrize("restarted", [True, False])
def test_a_field_that_is_no_longer_expected_is_drift(restarted: bool) -> None:
    fewer = copy.deepcopy(EXPECTED)
    del fewer["spec"]["template"]["spec"]["containers"][0]["args"]
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(fewer, live(), known) == "changed"


def test_a_child_without_a_digest_is_applied_once() -> None:
    found = live()
    del found["metadata"]["annotations"][APPLIED]

    assert reason_to_apply(EXPECTED, found, None) == "changed"


@pytest.mark.parametrize(
    ("expected", "found", "covered"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {}, False),
        ({"a": {}, "b": [], "c": False, "d": ""}, {}, True),  # left out when empty
        ({"a": {"b": 1}}, {"a": None}, False),
        ({"cpu": "1000m"}, {"cpu": "1"}, True),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, True),
        ({"memory": "1Gi"}, {"memory": "2Gi"}, False),
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["b", "a"], False),
        (["a"], ["a", "b"], False),
        ([{"name": "x"}], [{"name": "x", "protocol": "TCP"}], True),
        ([{"name": "x"}], None, False),
    ],
)
def test_a_live_object_covers_what_is_expected(expected: Any, found: Any, covered: bool) -> None:
    assert covers(expected, found) is covered


KEY = ("team-a", "tiny")


def stored(child: Child, version: int = 1) -> dict[str, Any]:
    metadata = {**child.manifest["metadata"], "uid": "u", "resourceVersion": str(version)}
    return {**child.manifest, "metadata": metadata}


@pytest.fixture
def children(service_of: Callable[..., LLMService], sized: Sized) -> list[Child]:
    return expected_children(service_of(engine={"maxLoras": 1}), sized, 1, "img:1")


@pytest.fixture
def cache(children: list[Child]) -> ObjectCache:
    """All wanted children exist; the cluster lacks the CRDs of the Prometheus Operator."""
    cache = ObjectCache()
    for kind in CHILD_KINDS.values():
        if kind.built_in:
            cache.replace(kind.name, None, [stored(one) for one in children if one.wanted and one.kind is kind], "1")
        else:
            cache.withdraw(kind.name)
    return cache


@pytest.fixture
def inputs(sized: Sized) -> ChildInputs:
    return ChildInputs("uid-of-tiny", 1, sized, 1)


@pytest.fixture
def in_sync(cache: ObjectCache, inputs: ChildInputs, children: list[Child]) -> InSyncCache:
    in_sync = InSyncCache(cache)
    in_sync.add(KEY, inputs, children)
    return in_sync


def test_unchanged_children_are_in_sync(in_sync: InSyncCache, inputs: ChildInputs) -> None:
    assert in_sync.has(KEY, inputs)
    assert in_sync.has(KEY, replace(inputs, sized=replace(inputs.sized)))


@pytest.mark.parametrize("change", [{"uid": "another"}, {"generation": 2}, {"replicas": 3}], ids=str)
def test_children_are_not_in_sync_after_a_change_of_the_inputs(
    change: dict[str, Any], in_sync: InSyncCache, inputs: ChildInputs
) -> None:
    assert not in_sync.has(KEY, replace(inputs, **change))


def test_children_are_not_in_sync_after_an_edit(
    in_sync: InSyncCache, cache: ObjectCache, children: list[Child], inputs: ChildInputs
) -> None:
    cache.put(children[1].kind.name, stored(children[1], version=2))

    assert not in_sync.has(KEY, inputs)


def test_children_are_not_in_sync_after_a_deletion(
    in_sync: InSyncCache, cache: ObjectCache, children: list[Child], inputs: ChildInputs
) -> None:
    cache.drop(children[1].kind.name, stored(children[1]))

    assert not in_sync.has(KEY, inputs)


def test_children_are_not_in_sync_once_the_cluster_serves_a_missing_kind(
    in_sync: InSyncCache, cache: ObjectCache, inputs: ChildInputs
) -> None:
    cache.replace("PodMonitor", None, [], "5")

    assert not in_sync.has(KEY, inputs)


def test_missing_children_and_kinds_without_a_watch_are_never_in_sync(
    cache: ObjectCache, children: list[Child], inputs: ChildInputs
) -> None:
    in_sync = InSyncCache(cache)
    cache.drop("Deployment", stored(next(one for one in children if one.kind.name == "Deployment")))
    in_sync.add(KEY, inputs, children)
    assert len(in_sync) == 0

    in_sync = InSyncCache(ObjectCache())
    in_sync.add(KEY, inputs, children)
    assert len(in_sync) == 0


def test_a_deleted_service_is_forgotten(in_sync: InSyncCache) -> None:
    in_sync.forget(KEY)

    assert len(in_sync) == 0
