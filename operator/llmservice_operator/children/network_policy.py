"""Who may reach a service's pods: the gateway, the operator, Prometheus, and whom the spec names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.child import child_manifest
from llmservice_operator.children.deployment import PORT

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label that the API server gives to every namespace."""

DEFAULT_PROMETHEUS = "*:app.kubernetes.io/name=prometheus"
"""Prometheus as the usual charts label its pods, in whichever namespace it runs."""


class PeerError(ValueError):
    """A peer that can't be read; the message says how one is written."""


def expected_network_policy(service: LLMService, peers: Sequence[Manifest]) -> Manifest:
    """The HTTP port is open to `peers` and to `spec.networkPolicy.from`; nothing is said about what pods may reach."""
    rule = {
        "from": [*peers, *service.spec.network_policy.peers],
        "ports": [{"protocol": "TCP", "port": PORT}],
    }
    spec = {
        "podSelector": {"matchLabels": labels.selector_labels(service.name)},
        "policyTypes": ["Ingress"],
        "ingress": [rule],
    }
    return child_manifest(service, "NetworkPolicy") | {"spec": spec}


def platform_peers(own_namespace: str | None, prometheus: Iterable[str]) -> tuple[Manifest, ...]:
    """Gateway and operator by the label of their chart, in the operator's own namespace, and every Prometheus.

    An operator that runs outside of the cluster has no namespace: then their label counts in all of them.
    """
    ours = _peer(own_namespace or "*", {labels.PART_OF: labels.APP})
    return (ours, *(parse_peer(text) for text in prometheus))


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
