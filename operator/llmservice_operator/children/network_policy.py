"""Who may reach a service's pods, and what they may reach: DNS, the model's source, and what the spec names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import child_manifest
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.deployment import METRICS_PORT, PORT
from llmservice_operator.locations import ModelLocation

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label that the API server gives to every namespace."""

DEFAULT_PROMETHEUS = "*:app.kubernetes.io/name=prometheus"
"""Prometheus as the usual charts label its pods, in whichever namespace it runs."""


_METADATA = ("169.254.0.0/16", "168.63.129.16/32", "fe80::/10", "fd00:ec2::254/128")
"""Link-local addresses, and others of metadata servers (Azure, AWS by IPv6), which serve the node's credentials."""
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
"""RFC 1918, RFC 6598 (carrier-grade NAT, which some clusters use for pods) and RFC 4193."""


def _addresses(excluded: Iterable[str]) -> list[Manifest]:
    """All addresses of both families except these."""
    v4, v6 = ([one for one in excluded if (":" in one) == is_v6] for is_v6 in (False, True))
    return [{"ipBlock": {"cidr": "0.0.0.0/0", "except": v4}}, {"ipBlock": {"cidr": "::/0", "except": v6}}]


_PUBLIC = _addresses((*_PRIVATE, *_METADATA))
_ANYWHERE = [{"namespaceSelector": {}}, *_addresses(_METADATA)]
"""Some network plugins match pods by selectors alone, never by an ipBlock."""
_DNS = {
    "to": [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "169.254.20.10/32"}}],
    "ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")],
}
"""The cluster's DNS, on 5353 in OpenShift, and NodeLocal DNSCache at the address that its documentation uses."""


class PeerError(ValueError):
    """A peer that can't be parsed; the message says how one is written."""


@dataclass(frozen=True, slots=True)
class PlatformPeers:
    """Who reaches the pods of every service, as NetworkPolicyPeers."""

    own: Manifest
    """Gateway and operator: the API and /metrics."""
    prometheus: tuple[Manifest, ...]
    """/metrics alone."""


def expected_network_policy(service: LLMService, location: ModelLocation, peers: PlatformPeers) -> Manifest:
    """Clients reach the API's port, Prometheus that of /metrics, gateway and operator both, as do clients of an
    InferencePool, of which one is the endpoint picker.

    The pods reach DNS, what the model at `location` is downloaded from, and `spec.networkPolicy.to`.
    """
    given = service.spec.network_policy.peers
    pickers = given if service.spec.gateway.inference_pool else []
    spec = {
        "podSelector": {"matchLabels": labels.selector_labels(service.name)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [peers.own, *given], "ports": [_tcp(PORT)]},
            {"from": [peers.own, *peers.prometheus, *pickers], "ports": [_tcp(METRICS_PORT)]},
        ],
        "egress": [_DNS, *_source_rules(service, location), *service.spec.network_policy.to],
    }
    return child_manifest(service, "NetworkPolicy") | {"spec": spec}


def _source_rules(service: LLMService, location: ModelLocation) -> list[Manifest]:
    """What the downloads of model and adapters need. Volumes and images are mounted by the kubelet, and need nothing.

    A policy has addresses, not host names. The hub and AWS have public addresses, so port 443 of those is open. A
    mirror or another store may be anywhere, inside the cluster too, so its URL's port is open everywhere; for a
    Service, the network plugin may compare the port of the pods behind it.
    """
    uris = [location.fetch_uri or "", *(one.uri for one in service.spec.adapters)]
    s3 = service.spec.model.s3
    endpoints = {"hf": location.hf_endpoint, "s3": s3.endpoint if s3 else None}
    schemes = {uri.partition("://")[0] for uri in uris}
    rules = [_source_rule(endpoint) for scheme, endpoint in endpoints.items() if scheme in schemes]
    return [rule for number, rule in enumerate(rules) if rule and rule not in rules[:number]]


def _source_rule(endpoint: str | None) -> Manifest:
    """Empty where nothing can be downloaded from there."""
    if endpoint is None:
        return {"to": _PUBLIC, "ports": [_tcp(443)]}
    port = _port(endpoint)
    return {} if port is None else {"to": _ANYWHERE, "ports": [_tcp(port)]}


def _port(url: str) -> int | None:
    """None for an invalid URL or port: nothing can be downloaded from there."""
    try:
        parts = urlsplit(url)
        return parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        return None


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
        raise PeerError(f"{text!r} names no peer: expected NAMESPACE[:KEY=VALUE,…] or *:KEY=VALUE,…")
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
