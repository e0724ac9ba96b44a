from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from harness.world.whole_cache import fill
from llmservice_operator.api.kinds import CHILD_KINDS, Child
from llmservice_operator.api.resource import LLMService
from llmservice_operator.children.expected import expected_children
from llmservice_operator.cluster.applier import Applier, Refusal, RefusalBackoff
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.pods.pod import Trouble
from llmservice_operator.sizing import Sized

UID = "uid-of-tiny"
BUILT_IN = ["ServiceAccount", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Deployment"]
ChildrenOf = Callable[..., list[Child]]


@pytest.fixture
def children_of(service_of: Callable[..., LLMService], sized: Sized) -> ChildrenOf:
    return lambda **spec: expected_children(service_of(**{"engine": {"maxLoras": 1}} | spec), sized, 1, "img:1")


class SyncedApplier:
    """An applier whose cache is filled before each apply, as watches would do."""

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

    (refusal,) = await SyncedApplier(kube).apply(children_of(), UID)

    assert refusal.kind == kind
    assert refusal.trouble.reason == "NameConflict"
    assert f"a {kind} called {child.key[2]} is there already" in refusal.trouble.message
    assert await live(kube, child) == before
    for other in children_of():
        if other.wanted and other.kind.built_in and other.key != child.key:
            assert await live(kube, other), "one refusal holds up no other child"


@pytest.mark.parametrize("kind", BUILT_IN)
async def test_owned_fields_are_put_right_and_foreign_additions_stay(
    kind: str, kube: KubeClient, children_of: ChildrenOf
) -> None:
    child = of_kind(children_of(), kind)
    synced = SyncedApplier(kube)
    await synced.apply(children_of(), UID)
    drift: dict[str, Any] = {
        "metadata": {
            "annotations": {"team": "a"},
            "labels": {"app.kubernetes.io/component": "other", "cost-centre": "7"},
        }
    }
    await kube.request("PATCH", f"{path(child)}/{child.key[2]}", body=drift)

    assert await synced.apply(children_of(), UID) == []

    metadata = (await live(kube, child))["metadata"]
    assert metadata["annotations"]["team"] == "a"
    assert metadata["labels"] == {**child.manifest["metadata"]["labels"], "cost-centre": "7"}


async def test_the_spec_of_every_child_is_put_right(kube: KubeClient, children_of: ChildrenOf) -> None:
    synced = SyncedApplier(kube)
    await synced.apply(children_of(), UID)
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

    await synced.apply(children_of(), UID)

    for kind in drift:
        assert (await live(kube, of_kind(children_of(), kind)))["spec"] == before[kind]["spec"]


async def test_a_network_policy_with_egress_is_applied_once(kube: KubeClient, children_of: ChildrenOf) -> None:
    """The API server adds the default protocol, which is no difference, after a restart either."""
    proxy = {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 3128}]}
    children = children_of(model={"uri": "hf://org/name"}, networkPolicy={"to": [proxy, {}]})
    policy = of_kind(children, "NetworkPolicy")
    assert await SyncedApplier(kube).apply(children, UID) == []
    before = await live(kube, policy)
    assert before["spec"]["egress"][-2]["ports"] == [{"port": 3128, "protocol": "TCP"}]
    assert before["spec"]["egress"][-1] == {}

    assert await SyncedApplier(kube).apply(children, UID) == []

    assert (await live(kube, policy))["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_an_unwanted_child_is_removed_also_after_a_restart(kube: KubeClient, children_of: ChildrenOf) -> None:
    await SyncedApplier(kube).apply(children_of(), UID)
    off = children_of(networkPolicy={"enabled": False})

    assert await SyncedApplier(kube).apply(off, UID) == []

    policy = of_kind(off, "NetworkPolicy")
    assert await kube.get_child(policy.kind, *policy.key[1:]) is None


async def test_an_unwanted_child_of_another_owner_stays(kube: KubeClient, children_of: ChildrenOf) -> None:
    off = children_of(networkPolicy={"enabled": False})
    policy = of_kind(off, "NetworkPolicy")
    foreign = {**policy.manifest, "metadata": {"name": "tiny"}}
    await kube.request("POST", path(policy), body=foreign, content_type="application/json")

    assert await SyncedApplier(kube).apply(off, UID) == []

    assert await live(kube, policy)


async def test_children_of_a_deleted_service_are_waited_for(kube: KubeClient, children_of: ChildrenOf) -> None:
    child = of_kind(children_of(), "Service")
    await SyncedApplier(kube).apply(children_of(), UID)
    again = copy.deepcopy(child.manifest)
    again["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-next"

    (refusal,) = await SyncedApplier(kube).apply([Child(again)], "uid-of-the-next")

    assert refusal.trouble.reason == "Replacing"
    assert (await live(kube, child))["metadata"]["ownerReferences"][0]["uid"] == UID


async def test_a_kind_whose_crd_is_missing_is_left_out(kube: KubeClient, children_of: ChildrenOf) -> None:
    wanted = children_of(monitoring={"podMonitor": True})

    assert await SyncedApplier(kube).apply(wanted, UID) == []


@pytest.mark.parametrize(
    ("spec", "kind", "says"),
    [
        ({"networkPolicy": {"from": [{}]}}, "NetworkPolicy", "422 NetworkPolicy.networking.k8s.io"),
        (
            {"networkPolicy": {"to": [{"port": 80}]}},
            "NetworkPolicy",
            "500 failed to create typed patch object (team-a/tiny; networking.k8s.io/v1, Kind=NetworkPolicy): .spec",
        ),
        (
            {"podTemplate": {"sidecars": [{"name": "shipper", "image": "x:1", "resorces": {}}]}},
            "Deployment",
            '.spec.template.spec.containers[name="shipper"].resorces: field not declared in schema',
        ),
        (
            {"podTemplate": {"volumes": [{"name": "data", "emptyDir": {}}] * 2}},
            "Deployment",
            '.spec.template.spec.volumes: duplicate entries for key [name="data"]',
        ),
        (
            {"podTemplate": {"volumes": [{"name": "data", "emptyDir": {"sizeLimit": "much"}}]}},
            "Deployment",
            "500 failed to convert new object (team-a/tiny; apps/v1, Kind=Deployment) to proper version:",
        ),
    ],
)
async def test_a_refused_child_is_reported_with_the_servers_message(
    spec: dict[str, Any], kind: str, says: str, kube: KubeClient, children_of: ChildrenOf
) -> None:
    (refusal,) = await SyncedApplier(kube).apply(children_of(**spec), UID)

    assert (refusal.kind, refusal.trouble.reason) == (kind, "ApplyFailed")
    assert says in refusal.trouble.message


async def test_an_internal_error_of_the_api_server_is_not_taken_for_a_refusal(
    kube: KubeClient, children_of: ChildrenOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise KubeError(500, "PATCH /apis/apps/v1/…: 500 etcdserver: request timed out")

    monkeypatch.setattr(kube, "apply", fail)

    with pytest.raises(KubeError, match="etcdserver"):
        await SyncedApplier(kube).apply(children_of(), UID)


async def test_a_refused_child_is_not_applied_at_every_tick(kube: KubeClient, children_of: ChildrenOf) -> None:
    refused = children_of(networkPolicy={"from": [{}]})
    synced = SyncedApplier(kube)
    (reported,) = await synced.apply(refused, UID)
    asked: list[str] = []
    kube.answered = lambda method, path, *_: asked.append(f"{method} {path}")

    assert await synced.applier.apply(refused, UID) == [reported]
    assert asked == []

    await synced.applier.apply(refused, UID, generation=2)
    assert [line for line in asked if line.startswith("PATCH")] == [
        "PATCH /apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies/tiny"
    ]


async def test_an_object_created_meanwhile_by_another_client_is_not_overwritten(
    kube: KubeClient, children_of: ChildrenOf
) -> None:
    child = of_kind(children_of(), "Deployment")
    foreign = {**child.manifest, "metadata": {"name": "tiny"}, "spec": {**child.manifest["spec"], "replicas": 5}}
    await kube.request("POST", path(child), body=foreign, content_type="application/json")

    with pytest.raises(KubeError) as refused:
        await kube.apply(child.kind, child.manifest, force=False)

    assert refused.value.status == 409
    assert (await live(kube, child))["spec"]["replicas"] == 5


@pytest.mark.parametrize("restarted", [False, True])
async def test_without_differences_no_request_is_sent(
    restarted: bool, kube: KubeClient, children_of: ChildrenOf
) -> None:
    synced = SyncedApplier(kube)
    await synced.apply(children_of(), UID)
    synced = SyncedApplier(kube) if restarted else synced
    await synced.see()
    asked: list[str] = []
    kube.answered = lambda method, path, *_: asked.append(f"{method} {path}")

    await synced.applier.apply(children_of(), UID)

    assert asked == []


async def test_children_of_a_deleted_service_are_forgotten(kube: KubeClient, children_of: ChildrenOf) -> None:
    synced = SyncedApplier(kube)
    await synced.apply(children_of(), UID)
    deployment = of_kind(children_of(), "Deployment")
    await kube.delete_child(deployment.kind, *deployment.key[1:], uid=(await live(kube, deployment))["metadata"]["uid"])

    assert len(synced.applier) == len(BUILT_IN) + 1  # the headless Service
    synced.applier.forget("team-a", "tiny")
    assert len(synced.applier) == 0
    await synced.apply(children_of(), UID)

    assert await live(kube, deployment)


def test_the_table_above_has_every_built_in_kind() -> None:
    assert {kind.name for kind in CHILD_KINDS.values() if kind.built_in} == set(BUILT_IN)


TROUBLE = Trouble("ApplyFailed", "exceeded quota")
LIVE: dict[str, Any] = {"metadata": {"resourceVersion": "7"}}


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def child(service_of: Callable[..., LLMService], sized: Sized) -> Child:
    return expected_children(service_of(), sized, 1, "img:1")[0]


def test_a_refused_child_is_tried_again_with_exponential_backoff(child: Child) -> None:
    clock = Clock()
    backoff = RefusalBackoff(clock)
    asked = []
    for second in range(1000):
        clock.now_s = float(second)
        if backoff.pending(child, None, 1) is None:
            asked.append(second)
            backoff.add(child, None, 1, TROUBLE)

    assert asked == [0, 5, 15, 35, 75, 155, 315, 615, 915]


@pytest.mark.parametrize(
    ("live", "generation", "wanted"),
    [
        pytest.param(None, 2, True, id="the spec was edited"),
        pytest.param(LIVE, 1, True, id="there is an event of the child"),
        pytest.param(None, 1, False, id="the child is to go now"),
    ],
)
def test_a_changed_child_is_tried_again_at_once(
    live: dict[str, Any] | None, generation: int, wanted: bool, child: Child
) -> None:
    backoff = RefusalBackoff(Clock())
    for _ in range(4):
        backoff.add(child, None, 1, TROUBLE)

    assert backoff.pending(child, None, 1) == TROUBLE
    assert backoff.pending(replace(child, wanted=wanted), live, generation) is None


def test_the_backoff_of_another_attempt_starts_anew(child: Child) -> None:
    clock = Clock()
    backoff = RefusalBackoff(clock)
    for _ in range(6):
        backoff.add(child, None, 1, TROUBLE)
    backoff.add(child, None, 2, TROUBLE)
    clock.now_s += 5

    assert backoff.pending(child, None, 2) is None


def test_applied_and_deleted_children_are_forgotten(child: Child) -> None:
    backoff = RefusalBackoff(Clock())
    backoff.add(child, None, 1, TROUBLE)
    backoff.clear(child.key)
    assert len(backoff) == 0

    backoff.add(child, None, 1, TROUBLE)
    backoff.forget("team-a", "another")
    assert len(backoff) == 1
    backoff.forget("team-a", "tiny")
    assert len(backoff) == 0
