"""The routing table, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from llmservice_gateway.openai_error import GatewayError
from llmservice_gateway.routing.routes import Adapters, RoutedPod, RoutedService, RouteTable, build_table, is_routable


def service(
    name: str, namespace: str = "default", served_name: str | None = None, created: str = "2026-01-02T03:04:05Z"
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": created},
        "spec": {"model": {"uri": "file:///m"} | ({"servedName": served_name} if served_name else {})},
    }


def pod(
    name: str,
    instance: str,
    namespace: str = "default",
    served_name: str | None = None,
    ready: bool = True,
    ip: str = "10.0.0.1",
    **metadata: Any,
) -> dict[str, Any]:
    annotations = {"serving.llmservice.io/served-name": served_name} if served_name else {}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "labels": {"app.kubernetes.io/instance": instance},
            "annotations": annotations,
            **metadata,
        },
        "spec": {"containers": [{"name": "server", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


def table_of(
    services: list[dict[str, Any]], pods: list[dict[str, Any]], reported: Mapping[str, Adapters] = MappingProxyType({})
) -> RouteTable:
    routed = [found for found in map(RoutedPod.parse, pods) if found is not None]
    return build_table(map(RoutedService.parse, services), routed, reported)


def names(table_route: Any) -> list[str]:
    return [backend.name for backend in table_route.backends]


def test_model_is_routed_to_the_ready_pods_of_its_service_only() -> None:
    table = table_of(
        [service("llama", served_name="llama-3"), service("other")],
        [pod("a", "llama"), pod("b", "llama", ready=False), pod("c", "other"), pod("d", "stranger")],
    )
    assert names(table.find("llama-3")) == ["a"]
    assert names(table.find("other")) == ["c"]


def test_service_without_pods_is_known_and_not_ready() -> None:
    assert table_of([service("llama")], []).find("llama").backends == ()


def test_unknown_model_is_not_found() -> None:
    with pytest.raises(GatewayError, match=r"gpt-5.*does not exist"):
        table_of([service("llama")], []).find("gpt-5")


def test_a_bare_name_belongs_to_the_oldest_service_that_claims_it() -> None:
    table = table_of(
        [service("llama", "a", created="2026-02-01T00:00:00Z"), service("llama", "b")],
        [pod("p", "llama", "a"), pod("q", "llama", "b")],
    )
    assert names(table.find("llama")) == ["q"]
    assert names(table.find("a/llama")) == ["p"]
    assert names(table.find("b/llama")) == ["q"]
    assert [name for name, _ in table.models()] == ["a/llama", "llama"]


def test_a_qualified_name_always_means_its_namespace() -> None:
    """Whatever another namespace calls its services, and however old these are."""
    thief = service("thief", "b", served_name="a/llama", created="2025-01-01T00:00:00Z")
    pods = [pod("p", "llama", "a"), pod("q", "thief", "b")]
    table = table_of([service("llama", "a"), thief], pods)
    assert names(table.find("a/llama")) == ["p"]
    assert names(table.find("b/a/llama")) == ["q"]
    assert [name for name, _ in table.models()] == ["b/a/llama", "llama"]
    with pytest.raises(GatewayError):
        table_of([service("other", "a"), thief], pods).find("a/llama")


def test_a_pod_claims_no_name_that_its_service_does_not() -> None:
    """A user who may create pods may annotate them."""
    table = table_of(
        [service("llama", "a"), service("other", "b")],
        [pod("p", "llama", "a"), pod("q", "other", "b", served_name="llama")],
    )
    assert names(table.find("llama")) == ["p"]


def test_served_name_may_contain_a_slash() -> None:
    table = table_of([service("llama", served_name="meta-llama/Llama-3")], [pod("p", "llama")])
    assert names(table.find("meta-llama/Llama-3")) == ["p"]
    assert names(table.find("default/meta-llama/Llama-3")) == ["p"]


def test_pod_keeps_answering_to_the_name_it_was_started_with_while_a_rename_rolls_out() -> None:
    table = table_of(
        [service("llama", served_name="new")],
        [pod("old-pod", "llama", served_name="old"), pod("new-pod", "llama", served_name="new")],
    )
    assert names(table.find("old")) == ["old-pod"]
    assert names(table.find("new")) == ["new-pod"]


def test_services_of_one_namespace_may_share_a_name_and_its_traffic() -> None:
    table = table_of(
        [service("on-a100", served_name="llama"), service("on-h100", served_name="llama")],
        [pod("p", "on-a100"), pod("q", "on-h100")],
    )
    assert names(table.find("llama")) == ["p", "q"]


def test_card_carries_the_creation_time_in_seconds() -> None:
    assert table_of([service("llama")], []).find("llama").created == 1767323045


@pytest.mark.parametrize(
    ("given", "routable"),
    [
        (pod("p", "llama"), True),
        (pod("p", "llama", ready=False), False),
        (pod("p", "llama", ip=""), False),
        (pod("p", "llama", deletionTimestamp="2026-01-01T00:00:00Z"), False),
        ({"metadata": {"name": "p"}}, False),
    ],
    ids=["ready", "not ready", "no address yet", "terminating though still ready", "no status yet"],
)
def test_pod_is_routable_when_ready_addressed_and_staying(given: dict[str, Any], routable: bool) -> None:
    assert is_routable(given) is routable


def test_backend_url_takes_the_container_port_and_brackets_ipv6() -> None:
    odd = pod("p", "llama", ip="fd00::1")
    odd["spec"]["containers"][0]["ports"][0]["containerPort"] = 9000
    assert table_of([service("llama")], [odd]).find("llama").backends[0].url == "http://[fd00::1]:9000"


def test_pods_have_the_slots_in_their_services_status() -> None:
    sized = service("llama") | {"status": {"sizing": {"maxNumSeqs": 24}}}
    table = table_of([sized, service("qwen")], [pod("a", "llama"), pod("b", "qwen")])
    assert [backend.slots for name in ("llama", "qwen") for backend in table.find(name).backends] == [24, None]


def with_adapters(manifest: dict[str, Any], *names: str) -> dict[str, Any]:
    adapters = [{"name": name, "uri": "hf://org/adapter"} for name in names]
    return {**manifest, "spec": {**manifest["spec"], "adapters": adapters}}


def test_an_adapter_is_routed_to_the_pods_of_its_model_that_report_it() -> None:
    services = [with_adapters(service("llama"), "poet", "bard"), service("other")]
    pods = [pod("a", "llama"), pod("b", "llama"), pod("c", "other")]
    reported: dict[str, Adapters] = {
        "uid-a": {"poet": None},
        "uid-b": {"poet": "no such file"},
        "uid-c": {"poet": None},
    }
    table = table_of(services, pods, reported)
    assert names(table.find("poet")) == names(table.find("default/poet")) == ["a"]
    assert names(table.find("bard")) == []
    assert names(table.find("llama")) == ["a", "b"]
    assert {name: route.parent for name, route in table.models()} == {
        "bard": "llama", "llama": None, "other": None, "poet": "llama",
    }  # fmt: skip


def test_a_models_name_goes_before_an_adapters() -> None:
    table = table_of(
        [with_adapters(service("llama"), "poet"), service("poet")],
        [pod("a", "llama"), pod("b", "poet")],
        {"uid-a": {"poet": None}},
    )
    assert names(table.find("poet")) == ["b"]
    assert [state.name for state in table.find("poet").services] == ["poet"]


def test_pods_of_the_old_name_keep_their_adapters_while_a_rename_rolls_out() -> None:
    table = table_of(
        [with_adapters(service("llama", served_name="new"), "poet")],
        [pod("old-pod", "llama", served_name="old"), pod("new-pod", "llama", served_name="new")],
        {"uid-old-pod": {"poet": None}},
    )
    assert names(table.find("poet")) == ["old-pod"]
    assert table.find("poet").parent == "new"
    assert [backend.name for backend in table.adapted] == ["old-pod", "new-pod"]


def test_services_that_list_the_same_adapter_share_its_traffic() -> None:
    services = [
        with_adapters(service(name, created=f"2026-01-0{number}T00:00:00Z"), "poet")
        for number, name in enumerate("ab", 1)
    ]
    table = table_of(
        [*services, service("c")],
        [pod(each, each) for each in "abc"],
        {f"uid-{each}": {"poet": None} for each in "abc"},
    )
    assert names(table.find("poet")) == ["a", "b"]
    assert table.find("poet").parent == "a"
    assert {state.name for state in table.find("poet").services} == {"a", "b"}
    assert [backend.name for backend in table.adapted] == ["a", "b"]


@pytest.mark.parametrize(
    ("reported", "awaited"),
    [
        ({}, True),
        ({"uid-a": {}, "uid-b": {"poet": "its rank is 64"}}, True),
        ({"uid-a": {"poet": None}, "uid-b": {"poet": "its rank is 64"}}, True),
        ({"uid-a": {"poet": "its rank is 64"}}, False),
        ({"uid-a": {"poet": "its rank is 64"}, "uid-b": {"poet": "its rank is 64"}}, False),
    ],
    ids=["not polled", "not tried by all", "loaded by one", "failed where polled", "failed"],
)
def test_an_adapter_that_all_pods_failed_to_load_is_not_awaited(reported: dict[str, Adapters], awaited: bool) -> None:
    pods = [pod("a", "llama"), pod("b", "llama")]
    (state,) = table_of([with_adapters(service("llama"), "poet")], pods, reported).find("poet").services
    assert state.is_awaited is awaited
    assert (state.reason, state.message) == (("Starting", "") if awaited else ("AdapterLoadFailed", "its rank is 64"))


def test_requests_go_by_prefix_unless_the_service_says_otherwise() -> None:
    strategies = {"a": None, "b": "prefixAffinity", "c": "leastLoad"}
    services = [service(name) for name in strategies]
    for one, strategy in zip(services, strategies.values(), strict=True):
        one["spec"]["routing"] = {"strategy": strategy} if strategy else {}
    table = table_of(services, [])
    assert [table.find(name).by_prefix for name in strategies] == [True, True, False]
