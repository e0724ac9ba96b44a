"""How to reach a Kubernetes API: its URL, and what it asks of a client; and the kubeconfig that says so."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONTEXT = "llmservice-local"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An API server. The emulator needs neither token nor certificate; the real one needs both."""

    url: str
    token: str | None = None
    ca_file: Path | None = None

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ssl_context(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=str(self.ca_file)) if self.ca_file else True

    def write_kubeconfig(self, path: Path) -> None:
        """Write a kubeconfig that only its owner may read: it carries the token."""
        cluster: dict[str, Any] = {"server": self.url}
        if self.ca_file is not None:
            cluster["certificate-authority"] = str(self.ca_file)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": CONTEXT, "cluster": cluster}],
            "users": [{"name": CONTEXT, "user": {"token": self.token} if self.token else {}}],
            "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT, "namespace": "default"}}],
            "current-context": CONTEXT,
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
