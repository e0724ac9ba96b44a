"""The operator's settings: one field for each flag, with its default, the environment variable and the help."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from llmservice_operator.children.network_policy import PlatformPeers


def _setting(flag: str, text: str, default: Any = None, *, env: str | None = None, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"flag": flag, "help": text, "env": env, "metavar": metavar})


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
    """Settings of one operator process; raises ValueError for values that can't work."""

    server_image: str = _setting(
        "--server-image",
        "image of the server pods (env LLMSERVICE_SERVER_IMAGE)",
        "llmservice-server:0.1.0",
        env="LLMSERVICE_SERVER_IMAGE",
    )
    namespaces: tuple[str, ...] = _setting("--namespace", "watch only this namespace; repeatable (default: all)", ())
    tick_s: float = _setting("--tick", "seconds between two passes", 5.0)
    prometheus_url: str | None = _setting(
        "--prometheus-url",
        "read scaling signals from this Prometheus (env LLMSERVICE_PROMETHEUS_URL); else from the pods",
        env="LLMSERVICE_PROMETHEUS_URL",
    )
    file_models_root: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        "--file-models-root",
        "allow file:///x as DIR/x, a folder that every node has and pods mount by a hostPath"
        " (env LLMSERVICE_FILE_MODELS_ROOT)",
        env="LLMSERVICE_FILE_MODELS_ROOT",
        metavar="DIR",
    )
    hf_endpoint: str = _setting(
        "--hf-endpoint",
        "hub or mirror that hf:// models come from, for the operator and the pods (env HF_ENDPOINT)",
        "https://huggingface.co",
        env="HF_ENDPOINT",
    )
    shares_hf_token: bool = _setting(
        "--share-hf-token",
        "read config.json of all models with this process's HF_TOKEN; without it a gated model is sized by its first"
        " pod",
        False,
    )
    secret_grants: tuple[str, ...] = _setting(
        "--usable-secrets",
        "Secrets that LLMServices of a namespace may name, * for all, beside those that the Namespace's annotation"
        " lists; repeatable",
        (),
        metavar="NAMESPACE=NAME,...",
    )
    allowed_env: tuple[str, ...] = _setting(
        "--allow-env",
        "let spec.podTemplate.env set this variable, or those of a pattern such as *_PROXY, though it is guarded;"
        " repeatable",
        (),
        metavar="NAME",
    )
    own_namespace: str | None = _setting(
        "--own-namespace",
        "where operator and gateway run: only pods of it are let in as theirs (env POD_NAMESPACE)",
        env="POD_NAMESPACE",
        metavar="NAME",
    )
    gateway_urls: tuple[str, ...] = _setting(
        "--gateway-metrics-url",
        "read held requests from this gateway's metrics port too, as http://HOST:PORT; repeatable (the gateways that"
        " are pods of --own-namespace are found by their labels)",
        (),
        metavar="URL",
    )
    prometheus_peers: tuple[str, ...] = _setting(
        "--prometheus-peer",
        "let these pods scrape the services' pods; * is every namespace; repeatable; an empty one: nobody"
        " (default: *:app.kubernetes.io/name=prometheus)",
        (),
        metavar="NAMESPACE[:KEY=VALUE,...]",
    )
    gateway_public_keys: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        "--gateway-public-keys",
        "where spec.access is gateway, let pods take only requests that the gateway has signed: its one or two Ed25519"
        " public keys in PEM, read again when they change (default: pods take all requests)",
        metavar="FILE",
    )
    leader_elect: bool = _setting("--leader-elect", "of several operators only the one that holds a Lease works", False)
    lease_name: str = _setting("--lease-name", "the Lease's name", "llmservice-operator", metavar="NAME")
    lease_namespace: str | None = _setting(
        "--lease-namespace", "the Lease's namespace (env POD_NAMESPACE)", env="POD_NAMESPACE", metavar="NAMESPACE"
    )
    webhook_name: str | None = _setting(
        "--webhook",
        "review LLMServices at apply: the Service that the API server calls, and the Secret with its certificate, both"
        " in --own-namespace",
        metavar="NAME",
    )
    webhook_port: int = _setting("--webhook-port", "port of the webhook", 9443)
    webhook_configuration: str | None = _setting(
        "--webhook-configuration",
        "give this ValidatingWebhookConfiguration a self-signed certificate (default: cert-manager does)",
        metavar="NAME",
    )
    watch_silence_s: float = _setting("--watch-silence", "begin a watch anew that is silent so long", 70.0)
    resync_s: float = _setting("--resync", "seconds between two lists of what is watched", 300.0)
    host: str = _setting(
        "--host",
        "address of /metrics, /healthz and the webhook (default: all of IPv4, or of IPv6 where env POD_IP is such)",
        "::" if ":" in os.environ.get("POD_IP", "") else "0.0.0.0",  # kopf's servers listen on one family
    )
    port: int = _setting("--port", "port of /metrics; 0 takes a free one", 8080)
    health_port: int = _setting("--health-port", "port of /healthz", 8081)

    def __post_init__(self) -> None:
        if not 0.1 <= self.tick_s <= 60:
            raise ValueError(f"--tick is {self.tick_s}, expected 0.1 to 60 seconds")
        for flag, value in (("--watch-silence", self.watch_silence_s), ("--resync", self.resync_s)):
            if value < 1:
                raise ValueError(f"{flag} is {value}, expected at least 1 second")
        for flag, port in (("--health-port", self.health_port), ("--webhook-port", self.webhook_port)):
            if not 1 <= port <= 65535:
                raise ValueError(f"{flag} is {port}, expected 1 to 65535")
        for url in self.gateway_urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"--gateway-metrics-url is {url!r}, expected http://HOST:PORT")
        if self.webhook_name and not self.own_namespace:
            raise ValueError("--webhook needs --own-namespace, or POD_NAMESPACE in the environment")
        if self.leader_elect and not self.lease_namespace:
            raise ValueError("--leader-elect needs --lease-namespace, or POD_NAMESPACE in the environment")

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """A flag for each field; its default's type says how it is parsed."""
        for one in fields(OperatorSettings):
            about, default = one.metadata, one.default
            options: dict[str, Any] = {
                "type": Path if about["metavar"] in {"DIR", "FILE"} else str,
                "metavar": about["metavar"],
            }
            if isinstance(default, bool):
                options = {"action": "store_true"}
            elif isinstance(default, tuple):
                default, options["action"] = None, "append"
            elif isinstance(default, int | float):
                options = {"type": type(default), "metavar": "SECONDS" if isinstance(default, float) else None}
            if about["env"]:
                default = os.environ.get(about["env"], default)
            parser.add_argument(about["flag"], dest=one.name, help=about["help"], default=default, **options)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        given: dict[str, Any] = {}
        for one in fields(cls):
            value = getattr(args, one.name)
            given[one.name] = tuple(value or ()) if one.default == () else value
        return cls(**given)

    def peers(self) -> PlatformPeers:
        """Who may reach every service's pods through their NetworkPolicy; raises ValueError."""
        from llmservice_operator.children.network_policy import DEFAULT_PROMETHEUS, PeerError, platform_peers

        try:
            given = self.prometheus_peers or [DEFAULT_PROMETHEUS]
            return platform_peers(self.own_namespace, filter(None, given))
        except PeerError as error:
            raise ValueError(f"--prometheus-peer {error}") from error

    def usable_secrets(self) -> Mapping[str, tuple[str, ...]]:
        """By namespace: Secrets that LLMServices may name, * for all; raises ValueError."""
        usable: dict[str, tuple[str, ...]] = {}
        for given in self.secret_grants:
            namespace, _, names = given.partition("=")
            if not namespace or not names:
                raise ValueError(f"--usable-secrets is {given!r}, expected NAMESPACE=NAME,NAME or NAMESPACE=*")
            usable[namespace] = usable.get(namespace, ()) + tuple(names.split(","))
        return usable

    @property
    def webhook(self) -> WebhookSettings | None:
        """None: nothing is reviewed before it is stored."""
        if not self.webhook_name or not self.own_namespace:
            return None
        return WebhookSettings(self.own_namespace, self.webhook_name, self.webhook_configuration, self.webhook_port)
