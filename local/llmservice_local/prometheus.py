"""A Prometheus beside the cluster, and the list of pods that it scrapes.

The list goes through a file, as Debian's Prometheus is built without service discovery by the Kubernetes API.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from llmservice_local.client import PODS, KubeClient
from llmservice_local.component import ComponentError, ComponentSpec
from llmservice_local.control.controller import Controller
from llmservice_local.control.informer import Informers
from llmservice_local.node.node import base_environment

Object = dict[str, Any]

SCRAPE_INTERVAL_S = 2


def prometheus_spec(folder: Path, targets: Path, log: Path, port: int) -> ComponentSpec:
    """The component, with its configuration written; raises `ComponentError` where there is no prometheus."""
    program = shutil.which("prometheus")
    if program is None:
        raise ComponentError("there is no prometheus on the PATH: install it (Debian: apt-get install prometheus)")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(configuration(targets), sort_keys=False), encoding="utf-8")
    return ComponentSpec(
        name="prometheus",
        command=[
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
        log=log,
        health_url=f"http://127.0.0.1:{port}/-/ready",
        env=base_environment(),
    )


def configuration(targets: Path, scrape_interval_s: int = SCRAPE_INTERVAL_S) -> Object:
    """prometheus.yml: whatever stands in the file of targets."""
    interval = f"{scrape_interval_s}s"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [{"job_name": "llmservice", "file_sd_configs": [{"files": [str(targets)]}]}],
    }


def scrape_targets(pods: Iterable[Object]) -> list[Object]:
    """The running pods of every LLMService, with the labels `namespace` and `pod` that a PodMonitor gives them."""
    found = []
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        if (metadata.get("labels") or {}).get("app.kubernetes.io/name") != "llmservice":
            continue
        ports = (port for container in pod["spec"]["containers"] for port in container.get("ports") or [])
        port = next((port["containerPort"] for port in ports if port.get("name") == "http"), None)
        if status.get("phase") == "Running" and status.get("podIP") and port is not None:
            labels = {"namespace": metadata["namespace"], "pod": metadata["name"]}
            found.append({"targets": [f"{status['podIP']}:{port}"], "labels": labels})
    return sorted(found, key=lambda target: str(target["targets"]))


class PrometheusTargets(Controller):
    """Keeps the file of targets true."""

    name = "prometheus-targets"
    watches = (PODS,)

    def __init__(self, client: KubeClient, informers: Informers, path: Path) -> None:
        super().__init__(client, informers)
        self._path = path
        self._written: list[Object] | None = None

    async def reconcile(self) -> float | None:
        targets = scrape_targets(self.informer(PODS))
        if targets != self._written:
            draft = self._path.with_suffix(".tmp")
            draft.write_text(json.dumps(targets), encoding="utf-8")
            draft.replace(self._path)
            self._written = targets
        return None
