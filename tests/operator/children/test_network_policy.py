from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.children.network_policy import (
    PeerError,
    PlatformPeers,
    expected_network_policy,
    parse_peer,
    platform_peers,
)

OURS = {"matchLabels": {"app.kubernetes.io/part-of": "llmservice"}}


def named(namespace: str) -> dict[str, Any]:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def test_clients_reach_the_api_prometheus_its_metrics_and_the_platform_both(service_of: Any) -> None:
    client = {"podSelector": {"matchLabels": {"app": "chat"}}}
    service = service_of(networkPolicy={"from": [client]})

    spec = expected_network_policy(service, platform_peers("system", ["monitoring"]))["spec"]

    ours = {"namespaceSelector": named("system"), "podSelector": OURS}
    assert spec["ingress"] == [
        {"from": [ours, client], "ports": [{"protocol": "TCP", "port": 8000}]},
        {"from": [ours, {"namespaceSelector": named("monitoring")}], "ports": [{"protocol": "TCP", "port": 8001}]},
    ]


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
def test_a_peer_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(PeerError, match="expected"):
        parse_peer(text)
