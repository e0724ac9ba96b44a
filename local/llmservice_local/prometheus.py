"""A Prometheus beside the cluster: finds the pods as it would on any cluster, by asking the API."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from llmservice_local.component import ComponentError, ComponentSpec
from llmservice_local.node import base_environment

SCRAPE_INTERVAL_S = 2


def prometheus_spec(state_dir: Path, kubeconfig: Path, port: int) -> ComponentSpec:
    """The component, with its configuration written; raises `ComponentError` where there is no prometheus."""
    program = shutil.which("prometheus")
    if program is None:
        raise ComponentError("there is no prometheus on the PATH: install it (Debian: apt-get install prometheus)")
    folder = state_dir / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(configuration(kubeconfig), sort_keys=False), encoding="utf-8")
    return ComponentSpec(
        name="prometheus",
        command=[
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
        log=state_dir / "components" / "prometheus.log",
        health_url=f"http://127.0.0.1:{port}/-/ready",
        env=base_environment(),
    )


def configuration(kubeconfig: Path, scrape_interval_s: int = SCRAPE_INTERVAL_S) -> dict[str, Any]:
    """prometheus.yml: every pod of every LLMService, with the labels `namespace` and `pod` that a PodMonitor gives."""
    keep = {
        "source_labels": ["__meta_kubernetes_pod_label_app_kubernetes_io_name"],
        "regex": "llmservice",
        "action": "keep",
    }
    port = {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": "http", "action": "keep"}
    return {
        "global": {"scrape_interval": f"{scrape_interval_s}s", "scrape_timeout": f"{scrape_interval_s}s"},
        "scrape_configs": [
            {
                "job_name": "llmservice",
                "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": str(kubeconfig)}],
                "relabel_configs": [
                    keep,
                    port,
                    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
                ],
            }
        ],
    }
