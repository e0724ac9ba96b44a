"""Children meet an API server with real server-side apply; time is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from harness.whole_cache import fill
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.resource import LLMService
from llmservice_operator.apply.applier import Applier, Refusal
from llmservice_operator.children.child import Child
from llmservice_operator.children.children import expected_children
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.sizing.sizing import Sized

UID = "uid-of-tiny"
BUILT_IN = ["ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment"]
ChildrenOf = Callable[..., list[Child]]


@pytest.fixture
def children_of(service_of: Callable[..., LLMService], sized: Sized) -> ChildrenOf:
    return lambda **spec: expected_children(service_of(**spec), sized, 1, "img:1")


class Hands:
    """An applier with a cache of its own that holds, when it is asked to apply, what watches would have told of."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube, self._cache = kube, ObjectCache()
        self.applier = Applier(kube, self._cache)

    async def apply(self, children: list[Child], owner_uid: str) -> list[Refusal]:
        await self.see()
        return await self.applier.apply(children, owner_uid)

    async def see(self) -> None:
        await fill(self._kube, self._cache)


def of_kind(children: list[Child], kind: str) -> Child:
    return next(child for child in children if child.kind.name == kind)


async def live(kube: KubeClient, child: Child) -> dict[str, Any]:
    found = await kube.get_child(child.kind, *child.key[1:])
    assert found is not None
    return found


def path(child: Child) -> str:
    root = f"/apis/{child.kind.api_version}" if child.kind.group else "/api/v1"
    return f"{root}/namespaces/team-a/{child.kind.plural}"


@pytest.mark.parametrize("kind", BUILT_IN)
async def test_a_foreign_object_of_a_childs_name_is_named_and_left_as_it_is(
    kind: str, kube: KubeClient, children_of: ChildrenOf
) -> None:
    child = of_kind(children_of(), kind)
    foreign = copy.deepcopy(child.manifest)
    foreign["metadata"] = {"name": child.key[2], "labels": {"whose": "ours"}}
    before = await kube.request("POST", path(child), body=foreign, content_type="application/json")

    (refusal,) = await Hands(kube).apply(children_of(), UID)

    assert refusal.kind == kind
    assert refusal.trouble.reason == "NameConflict"
    assert f"a {kind} called {child.key[2]} is there already" in refusal.trouble.message
    assert await live(kube, child) == before
    for other in children_of():
        if other.kind.built_in and other.key != child.key:
            assert await live(kube, other), "one refusal holds up no other child"


@pytest.mark.parametrize("kind", BUILT_IN)
async def test_owned_fields_are_put_right_and_foreign_additions_stay(
    kind: str, kube: KubeClient, children_of: ChildrenOf
) -> None:
    child = of_kind(children_of(), kind)
    hands = Hands(kube)
    await hands.apply(children_of(), UID)
    drift: dict[str, Any] = {
        "metadata": {
            "annotations": {"team": "a"},
            "labels": {"app.kubernetes.io/component": "other", "cost-centre": "7"},
        }
    }
    await kube.request("PATCH", f"{path(child)}/{child.key[2]}", body=drift)

    assert await hands.apply(children_of(), UID) == []

    metadata = (await live(kube, child))["metadata"]
    assert metadata["annotations"]["team"] == "a"
    assert metadata["labels"] == {**child.manifest["metadata"]["labels"], "cost-centre": "7"}


async def test_the_spec_of_every_child_is_put_right(kube: KubeClient, children_of: ChildrenOf) -> None:
    hands = Hands(kube)
    await hands.apply(children_of(), UID)
    drift = {
        "Service": {"selector": {"app": "other"}},
        "NetworkPolicy": {"ingress": [{}], "egress": [{}]},
        "PodDisruptionBudget": {"maxUnavailable": "50%"},
        "Deployment": {"replicas": 9},
    }
    before = {kind: await live(kube, of_kind(children_of(), kind)) for kind in drift}
    for kind, spec in drift.items():
        child = of_kind(children_of(), kind)
        await kube.request("PATCH", f"{path(child)}/{child.key[2]}", body={"spec": spec})

    await hands.apply(children_of(), UID)

    for kind in drift:
        assert (await live(kube, of_kind(children_of(), kind)))["spec"] == before[kind]["spec"]


async def test_what_pods_may_reach_is_applied_once_and_stays(kube: KubeClient, children_of: ChildrenOf) -> None:
    """The API server adds the default protocol, which is no difference, after a restart either."""
    proxy = {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 3128}]}
    children = children_of(model={"uri": "hf://org/name"}, networkPolicy={"to": [proxy, {}]})
    policy = of_kind(children, "NetworkPolicy")
    assert await Hands(kube).apply(children, UID) == []
    before = await live(kube, policy)
    assert before["spec"]["egress"][-2]["ports"] == [{"port": 3128, "protocol": "TCP"}]
    assert before["spec"]["egress"][-1] == {}

    assert await Hands(kube).apply(children, UID) == []

    assert (await live(kube, policy))["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_a_child_that_is_turned_off_goes_also_after_a_restart(kube: KubeClient, children_of: ChildrenOf) -> None:
    await Hands(kube).apply(children_of(), UID)
    off = children_of(networkPolicy={"enabled": False})

    assert await Hands(kube).apply(off, UID) == []

    policy = of_kind(off, "NetworkPolicy")
    assert await kube.get_child(policy.kind, *policy.key[1:]) is None


async def test_what_is_turned_off_but_belongs_to_others_stays(kube: KubeClient, children_of: ChildrenOf) -> None:
    off = children_of(networkPolicy={"enabled": False})
    policy = of_kind(off, "NetworkPolicy")
    foreign = {**policy.manifest, "metadata": {"name": "tiny"}}
    await kube.request("POST", path(policy), body=foreign, content_type="application/json")

    assert await Hands(kube).apply(off, UID) == []

    assert await live(kube, policy)


async def test_what_is_left_of_a_deleted_service_is_waited_for(kube: KubeClient, children_of: ChildrenOf) -> None:
    child = of_kind(children_of(), "Service")
    await Hands(kube).apply(children_of(), UID)
    again = copy.deepcopy(child.manifest)
    again["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-next"

    (refusal,) = await Hands(kube).apply([Child(again)], "uid-of-the-next")

    assert refusal.trouble.reason == "Replacing"
    assert (await live(kube, child))["metadata"]["ownerReferences"][0]["uid"] == UID


async def test_a_kind_whose_crd_is_missing_is_left_out(kube: KubeClient, children_of: ChildrenOf) -> None:
    wanted = children_of(monitoring={"podMonitor": True})

    assert await Hands(kube).apply(wanted, UID) == []


async def test_a_child_that_the_server_refuses_is_told_of_in_its_words(
    kube: KubeClient, children_of: ChildrenOf
) -> None:
    nobody = children_of(networkPolicy={"from": [{}]})

    (refusal,) = await Hands(kube).apply(nobody, UID)

    assert (refusal.kind, refusal.trouble.reason) == ("NetworkPolicy", "ApplyFailed")
    assert "must specify a peer" in refusal.trouble.message


async def test_a_refused_child_is_not_asked_for_at_every_tick(kube: KubeClient, children_of: ChildrenOf) -> None:
    nobody = children_of(networkPolicy={"from": [{}]})
    hands = Hands(kube)
    (told,) = await hands.apply(nobody, UID)
    asked: list[str] = []
    kube.answered = lambda method, path, *_: asked.append(f"{method} {path}")

    assert await hands.applier.apply(nobody, UID) == [told]
    assert asked == []

    await hands.applier.apply(nobody, UID, generation=2)
    assert [line for line in asked if line.startswith("PATCH")] == [
        "PATCH /apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies/tiny"
    ]


async def test_somebody_who_is_faster_by_a_moment_is_not_overwritten(kube: KubeClient, children_of: ChildrenOf) -> None:
    child = of_kind(children_of(), "Deployment")
    foreign = {**child.manifest, "metadata": {"name": "tiny"}, "spec": {**child.manifest["spec"], "replicas": 5}}
    await kube.request("POST", path(child), body=foreign, content_type="application/json")

    with pytest.raises(KubeError) as refused:
        await kube.apply(child.kind, child.manifest, force=False)

    assert refused.value.status == 409
    assert (await live(kube, child))["spec"]["replicas"] == 5


@pytest.mark.parametrize("restarted", [False, True])
async def test_nothing_is_asked_where_nothing_differs(
    restarted: bool, kube: KubeClient, children_of: ChildrenOf
) -> None:
    hands = Hands(kube)
    await hands.apply(children_of(), UID)
    hands = Hands(kube) if restarted else hands
    await hands.see()
    asked: list[str] = []
    kube.answered = lambda method, path, *_: asked.append(f"{method} {path}")

    await hands.applier.apply(children_of(), UID)

    assert asked == []


async def test_children_of_a_service_that_is_gone_are_forgotten(kube: KubeClient, children_of: ChildrenOf) -> None:
    hands = Hands(kube)
    await hands.apply(children_of(), UID)
    deployment = of_kind(children_of(), "Deployment")
    await kube.delete_child(deployment.kind, *deployment.key[1:], uid=(await live(kube, deployment))["metadata"]["uid"])

    assert len(hands.applier) == len(BUILT_IN) + 1  # the headless Service
    hands.applier.forget("team-a", "tiny")
    assert len(hands.applier) == 0
    await hands.apply(children_of(), UID)

    assert await live(kube, deployment)


def test_the_table_above_has_every_built_in_kind() -> None:
    assert {kind.name for kind in CHILD_KINDS.values() if kind.built_in} == set(BUILT_IN)
