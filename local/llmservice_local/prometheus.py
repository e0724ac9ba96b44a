"""A Prometheus that scrapes the pods and components of the cluster.

Its targets are in a file, because Debian's Prometheus is built without Kubernetes service discovery. Series get the
labels that the Prometheus Operator would set for PodMonitors (servers, gateway) and a ServiceMonitor (operator), so
that the alerts and dashboards of the chart work unchanged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from llmservice_local.client import PODS, KubeClient
from llmservice_local.component import ComponentError, ComponentSpec
from llmservice_local.control.controller import Controller
from llmservice_local.control.informer import Informers
from llmservice_local.node.process import base_environment
from llmservice_local.objects import Object

SCRAPE_INTERVAL_S = 2
RULES = "alerts.yaml"
NAMESPACE = "llmservice-system"
"""The namespace label of operator and gateway, which run outside the cluster here."""


def prometheus_spec(folder: Path, targets: Path, own: Mapping[str, str], log: Path, port: int) -> ComponentSpec:
    """Write the configuration and the alerts, and return the component; raises `ComponentError` without prometheus.

    `own` is the host:port of each of the cluster's components, which are scraped besides the pods.
    """
    from llmservice_operator.alerts_command import alerts_yaml

    program = shutil.which("prometheus")
    if program is None:
        raise ComponentError("prometheus is not on the PATH: install it (Debian: apt-get install prometheus)")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RULES).write_text(alerts_yaml(), encoding="utf-8")
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(configuration(targets, own), sort_keys=False), encoding="utf-8")
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


def configuration(targets: Path, own: Mapping[str, str], scrape_interval_s: int = SCRAPE_INTERVAL_S) -> Object:
    """prometheus.yml: the file of targets, the cluster's components, and the alerts."""
    interval = f"{scrape_interval_s}s"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [RULES],
        "scrape_configs": [
            {"job_name": "llmservice", "file_sd_configs": [{"files": [str(targets)]}]},
            *(_component_job(name, address) for name, address in own.items()),
        ],
    }


def _component_job(name: str, address: str) -> Object:
    full_name, by_service = f"llmservice-{name}", name != "gateway"
    labels = {"namespace": NAMESPACE, "pod": full_name, "container": name}
    labels |= {"service": full_name, "endpoint": "http"} if by_service else {"endpoint": "metrics"}
    job: Object = {"job_name": full_name, "static_configs": [{"targets": [address], "labels": labels}]}
    return job | ({"honor_labels": True} if name == "operator" else {})


def scrape_targets(pods: Iterable[Object]) -> list[Object]:
    """The running pods of every LLMService, with the labels that their PodMonitor gives them."""
    found = [target for pod in pods if (target := _target(pod)) is not None]
    return sorted(found, key=lambda target: str(target["targets"]))


def _target(pod: Object) -> Object | None:
    metadata, status = pod["metadata"], pod.get("status") or {}
    pod_labels = metadata.get("labels") or {}
    if pod_labels.get("app.kubernetes.io/name") != "llmservice" or status.get("phase") != "Running":
        return None
    ports = ((each["name"], port) for each in pod["spec"]["containers"] for port in each.get("ports") or [])
    named = next(((name, port["containerPort"]) for name, port in ports if port.get("name") == "metrics"), None)
    if not status.get("podIP") or named is None:
        return None
    container, number = named
    namespace, service = metadata["namespace"], pod_labels.get("app.kubernetes.io/instance", "")
    labels = {
        "namespace": namespace,
        "pod": metadata["name"],
        "container": container,
        "endpoint": "metrics",
        "job": f"{namespace}/{service}",
        "service": service,
    }
    return {"targets": [f"{status['podIP']}:{number}"], "labels": labels}


class PrometheusTargets(Controller):
    """Keeps the file of targets up to date."""

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
