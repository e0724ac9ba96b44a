"""Who may reach a service's pods: the gateway, the operator, Prometheus, and whom the spec names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.child import child_manifest
from llmservice_operator.children.deployment import METRICS_PORT, PORT

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label that the API server gives to every namespace."""

DEFAULT_PROMETHEUS = "*:app.kubernetes.io/name=prometheus"
"""Prometheus as the usual charts label its pods, in whichever namespace it runs."""


class PeerError(ValueError):
    """A peer that can't be read; the message says how one is written."""


@dataclass(frozen=True, slots=True)
class PlatformPeers:
    """Who reaches the pods of every service, as NetworkPolicyPeers."""

    own: Manifest
    """Gateway and operator: the API and /metrics."""
    prometheus: tuple[Manifest, ...]
    """/metrics alone."""


def expected_network_policy(service: LLMService, peers: PlatformPeers) -> Manifest:
    """Clients reach the API's port, Prometheus that of /metrics, gateway and operator both.

    Nothing is said about what pods may reach.
    """
    spec = {
        "podSelector": {"matchLabels": labels.selector_labels(service.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [peers.own, *service.spec.network_policy.peers], "ports": [_tcp(PORT)]},
            {"from": [peers.own, *peers.prometheus], "ports": [_tcp(METRICS_PORT)]},
        ],
    }
    return child_manifest(service, "NetworkPolicy") | {"spec": spec}


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}


def platform_peers(own_namespace: str | None, prometheus: Iterable[str]) -> PlatformPeers:
    """Gateway and operator by the label of their chart, in the operator's own namespace, and every Prometheus.

    An operator that runs outside of the cluster has no namespace: then their label counts in all of them.
    """
    ours = _peer(own_namespace or "*", {labels.PART_OF: labels.APP})
    return PlatformPeers(ours, tuple(parse_peer(text) for text in prometheus))


def parse_peer(text: str) -> Manifest:
    """`NAMESPACE`, `NAMESPACE:KEY=VALUE,…` or `*:KEY=VALUE,…` as a NetworkPolicyPeer; raises PeerError."""
    namespace, _, selector = text.partition(":")
    pods = dict(_label(part, text) for part in selector.split(",") if part)
    if not namespace or (namespace == "*" and not pods):
        raise PeerError(f"{text!r} admits nobody in particular: expected NAMESPACE[:KEY=VALUE,…] or *:KEY=VALUE,…")
    return _peer(namespace, pods)


def _label(part: str, text: str) -> tuple[str, str]:
    key, _, value = part.partition("=")
    if not key or not value:
        raise PeerError(f"{part!r} in {text!r} is no label: expected KEY=VALUE")
    return key, value


def _peer(namespace: str, pods: dict[str, str]) -> Manifest:
    """A peer with both selectors means pods that match in namespaces that match."""
    where: Manifest = {} if namespace == "*" else {"matchLabels": {NAMESPACE_NAME: namespace}}
    return {"namespaceSelector": where, **({"podSelector": {"matchLabels": pods}} if pods else {})}


DEFAULT_PEERS = platform_peers(None, [DEFAULT_PROMETHEUS])
