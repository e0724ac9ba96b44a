from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmservice_operator.children.network_policy import (
    PeerError,
    PlatformPeers,
    expected_network_policy,
    parse_peer,
    platform_peers,
)
from llmservice_operator.locations import ModelLocation, locate

IN_A_FOLDER = ModelLocation("file", "/srv/models/tiny")
PRIVATE = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"]
PUBLIC = [
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": [*PRIVATE, "169.254.0.0/16", "168.63.129.16/32"]}},
    {"ipBlock": {"cidr": "::/0", "except": ["fc00::/7", "fe80::/10", "fd00:ec2::254/128"]}},
]
ANYWHERE = [
    {"namespaceSelector": {}},
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16", "168.63.129.16/32"]}},
    {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::254/128"]}},
]
OURS = {"matchLabels": {"app.kubernetes.io/part-of": "llmservice"}}


def named(namespace: str) -> dict[str, Any]:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def test_clients_reach_the_api_prometheus_its_metrics_and_the_platform_both(service_of: Any) -> None:
    client = {"podSelector": {"matchLabels": {"app": "chat"}}}
    service = service_of(networkPolicy={"from": [client]})

    spec = expected_network_policy(service, IN_A_FOLDER, platform_peers("system", ["monitoring"]))["spec"]

    ours = {"namespaceSelector": named("system"), "podSelector": OURS}
    assert spec["ingress"] == [
        {"from": [ours, client], "ports": [{"protocol": "TCP", "port": 8000}]},
        {"from": [ours, {"namespaceSelector": named("monitoring")}], "ports": [{"protocol": "TCP", "port": 8001}]},
    ]


def test_an_endpoint_picker_reaches_the_metrics(service_of: Any) -> None:
    picker = {"podSelector": {"matchLabels": {"inferencepool": "tiny-epp"}}}
    service = service_of(networkPolicy={"from": [picker]}, gateway={"inferencePool": True})

    policy = expected_network_policy(service, IN_A_FOLDER, platform_peers("system", []))

    assert [picker in rule["from"] for rule in policy["spec"]["ingress"]] == [True, True]


def egress(service: Any, mirror: str | None = None) -> Any:
    location = locate(service.spec.model, Path("/srv/models"), mirror)
    policy = expected_network_policy(service, location, platform_peers("system", []))
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    return policy["spec"]["egress"]


def test_every_pod_reaches_dns(service_of: Any) -> None:
    dns, *others = egress(service_of(model={"uri": "pvc://claim/llama"}))
    assert dns["to"] == [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "169.254.20.10/32"}}]
    assert {(one["protocol"], one["port"]) for one in dns["ports"]} == {
        ("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353),
    }  # fmt: skip
    assert others == []


@pytest.mark.parametrize(
    ("model", "mirror", "reached"),
    [
        ({"uri": "hf://org/name"}, None, (PUBLIC, 443)),
        ({"uri": "hf://org/name"}, "https://mirror.example.com", (ANYWHERE, 443)),
        ({"uri": "hf://org/name"}, "http://mirror.tools.svc:8081/hf", (ANYWHERE, 8081)),
        ({"uri": "hf://org/name"}, "http://mirror", (ANYWHERE, 80)),
        ({"uri": "s3://bucket/llama"}, None, (PUBLIC, 443)),
        ({"uri": "s3://bucket/llama"}, "http://mirror", (PUBLIC, 443)),
        ({"uri": "s3://bucket/llama", "s3": {"region": "eu-west-1"}}, None, (PUBLIC, 443)),
        ({"uri": "s3://bucket/llama", "s3": {"endpoint": "http://minio.storage:9000"}}, None, (ANYWHERE, 9000)),
        ({"uri": "s3://bucket/llama", "s3": {"endpoint": "https://minio.storage"}}, None, (ANYWHERE, 443)),
        ({"uri": "s3://bucket/llama", "s3": {"endpoint": "http://minio.storage:70000"}}, None, None),
        ({"uri": "pvc://claim/llama"}, "http://mirror", None),
        ({"uri": "oci://registry.example.com:5000/llama"}, None, None),
        ({"uri": "file:///llama"}, None, None),
    ],
)
def test_pods_reach_only_the_source_of_their_model(
    service_of: Any, model: dict[str, Any], mirror: str | None, reached: tuple[Any, int] | None
) -> None:
    _dns, *rules = egress(service_of(model=model), mirror)
    expected = [] if reached is None else [{"to": reached[0], "ports": [{"protocol": "TCP", "port": reached[1]}]}]
    assert rules == expected


def test_pods_reach_the_sources_of_their_adapters(service_of: Any) -> None:
    adapters = [{"name": f"a{number}", "uri": uri} for number, uri in enumerate(["hf://o/a", "hf://o/b", "s3://b/a"])]
    _dns, *rules = egress(service_of(model={"uri": "pvc://claim/llama"}, adapters=adapters))
    assert rules == [{"to": PUBLIC, "ports": [{"protocol": "TCP", "port": 443}]}]


@pytest.mark.parametrize("uri", ["pvc://claim/m", "oci://registry.example.com/m", "s3://bucket/m", "file:///m"])
def test_pods_reach_the_mirror_that_their_adapters_come_from(service_of: Any, uri: str) -> None:
    model = {"uri": uri} | ({"s3": {"endpoint": "http://minio:9000"}} if uri.startswith("s3") else {})
    adapters = [{"name": "a", "uri": "hf://o/a"}]
    _dns, *rules = egress(service_of(model=model, adapters=adapters), "http://mirror:8080")
    assert {"to": ANYWHERE, "ports": [{"protocol": "TCP", "port": 8080}]} in rules
    assert not any(rule["to"] == PUBLIC for rule in rules)


def test_further_egress_rules_are_passed_unchanged(service_of: Any) -> None:
    proxy = {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 3128}]}
    metadata = {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]}
    service = service_of(model={"uri": "file:///llama"}, networkPolicy={"to": [proxy, metadata]})
    assert egress(service)[1:] == [proxy, metadata]


def test_an_operator_outside_of_the_cluster_lets_its_label_in_from_every_namespace() -> None:
    assert platform_peers(None, []) == PlatformPeers({"namespaceSelector": {}, "podSelector": OURS}, ())


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("monitoring", {"namespaceSelector": named("monitoring")}),
        ("*:app=prom", {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "prom"}}}),
        ("m:a=b,c=d", {"namespaceSelector": named("m"), "podSelector": {"matchLabels": {"a": "b", "c": "d"}}}),
    ],
)
def test_a_peer_is_a_namespace_and_labels(text: str, peer: dict[str, Any]) -> None:
    assert parse_peer(text) == peer


@pytest.mark.parametrize("text", ["", "*", "*:", ":a=b", "m:a", "m:a=", "m:=b"])
def test_an_empty_peer_is_refused(text: str) -> None:
    with pytest.raises(PeerError, match="expected"):
        parse_peer(text)
