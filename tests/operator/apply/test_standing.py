from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.resource import LLMService
from llmservice_operator.apply.standing import Inputs, Standing
from llmservice_operator.children.child import Child
from llmservice_operator.children.children import expected_children
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.sizing.sizing import Sized

KEY = ("team-a", "tiny")


def stored(child: Child, version: int = 1) -> dict[str, Any]:
    metadata = {**child.manifest["metadata"], "uid": "u", "resourceVersion": str(version)}
    return {**child.manifest, "metadata": metadata}


@pytest.fixture
def children(service_of: Callable[..., LLMService], sized: Sized) -> list[Child]:
    return expected_children(service_of(), sized, 1, "img:1")


@pytest.fixture
def cache(children: list[Child]) -> ObjectCache:
    """All wanted children are there; what needs Prometheus' CRDs is not known to the cluster."""
    cache = ObjectCache()
    for kind in CHILD_KINDS.values():
        if kind.built_in:
            cache.replace(kind.name, None, [stored(one) for one in children if one.kind is kind], "1")
        else:
            cache.withdraw(kind.name)
    return cache


@pytest.fixture
def inputs(sized: Sized) -> Inputs:
    return Inputs("uid-of-tiny", 1, sized, 1)


@pytest.fixture
def standing(cache: ObjectCache, inputs: Inputs, children: list[Child]) -> Standing:
    standing = Standing(cache)
    standing.note(KEY, inputs, children)
    return standing


def test_children_that_nobody_touched_still_stand(standing: Standing, inputs: Inputs) -> None:
    assert standing.holds(KEY, inputs)
    assert standing.holds(KEY, replace(inputs, sized=replace(inputs.sized)))


@pytest.mark.parametrize("change", [{"uid": "another"}, {"generation": 2}, {"replicas": 3}], ids=str)
def test_they_do_not_once_something_else_is_asked_for(
    change: dict[str, Any], standing: Standing, inputs: Inputs
) -> None:
    assert not standing.holds(KEY, replace(inputs, **change))


def test_they_do_not_once_one_was_touched(
    standing: Standing, cache: ObjectCache, children: list[Child], inputs: Inputs
) -> None:
    cache.put(children[1].kind.name, stored(children[1], version=2))

    assert not standing.holds(KEY, inputs)


def test_they_do_not_once_one_was_deleted(
    standing: Standing, cache: ObjectCache, children: list[Child], inputs: Inputs
) -> None:
    cache.drop(children[1].kind.name, stored(children[1]))

    assert not standing.holds(KEY, inputs)


def test_they_do_not_once_the_cluster_learns_a_kind(standing: Standing, cache: ObjectCache, inputs: Inputs) -> None:
    cache.replace("PodMonitor", None, [], "5")

    assert not standing.holds(KEY, inputs)


def test_what_is_missing_or_seen_by_no_watch_is_never_taken_for_standing(
    cache: ObjectCache, children: list[Child], inputs: Inputs
) -> None:
    standing = Standing(cache)
    cache.drop("Deployment", stored(next(one for one in children if one.kind.name == "Deployment")))
    standing.note(KEY, inputs, children)
    assert len(standing) == 0

    standing = Standing(ObjectCache())
    standing.note(KEY, inputs, children)
    assert len(standing) == 0


def test_nothing_is_remembered_of_a_service_that_is_gone(standing: Standing) -> None:
    standing.forget(KEY)

    assert len(standing) == 0
