"""What the operator is told at start-up, by flags or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmservice_operator.children.network_policy import DEFAULT_PEERS, PlatformPeers


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Of the validating webhook."""

    namespace: str
    name: str
    """Of its Service, and of the Secret with its certificate."""
    configuration: str | None = None
    """The ValidatingWebhookConfiguration that the leader gives a self-signed certificate; None: cert-manager does."""
    port: int = 9443


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Settings of one operator process."""

    server_image: str
    """The image that the server pods and their init containers run."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: the whole cluster."""

    tick_s: float = 5.0
    """Seconds between two passes over a service when nothing wakes it earlier."""

    prometheus_url: str | None = None
    """Base URL of a Prometheus; None: signals come straight from the pods."""

    file_models_root: Path | None = None
    """What `file:///x` is relative to, on the operator and in the pods alike; None: file:// is refused."""

    hf_endpoint: str = "https://huggingface.co"
    """The hub, or its mirror, that config.json of a hf:// model is read from, and that pods download from."""

    shares_hf_token: bool = False
    """Whether HF_TOKEN of the operator's own environment reads the figures of tenants' models."""

    usable_secrets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By namespace: Secrets that LLMServices may name, beside those of the Namespace's annotation; * is all of them."""

    allowed_env: tuple[str, ...] = ()
    """Guarded variables, or patterns of them, that spec.podTemplate.env may set."""

    peers: PlatformPeers = DEFAULT_PEERS
    """Who may reach every service's pods through their NetworkPolicy: gateway, operator, Prometheus."""

    port: int = 8080
    """Port of /metrics; 0 picks a free one."""

    health_port: int = 8081
    """Port of /healthz, which kopf serves."""

    host: str = "0.0.0.0"
    """Address that both bind to."""

    webhook: WebhookSettings | None = None
    """None: nothing is reviewed before it is stored."""

    lease_namespace: str | None = None
    """Where the Lease is that this process must hold to write; None: it is the only one, and needs none."""

    lease_name: str = "llmservice-operator"
    """Name of that Lease."""

    watch_silence_s: float = 70.0
    """A watch that brings nothing for so long is begun anew; the API server sends a bookmark every minute."""

    resync_s: float = 300.0
    """Seconds between two lists of everything that is watched, which find what watches missed."""
