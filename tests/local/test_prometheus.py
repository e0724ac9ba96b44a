from __future__ import annotations

from pathlib import Path
from typing import Any

from llmservice_local.prometheus import configuration, scrape_targets


def pod(name: str, ip: str, phase: str = "Running", app: str = "llmservice") -> dict[str, Any]:
    ports = [{"name": "other", "containerPort": 1}, {"name": "http", "containerPort": 8000}]
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": {"app.kubernetes.io/name": app}},
        "spec": {"containers": [{"name": "server", "ports": ports}]},
        "status": {"phase": phase, "podIP": ip},
    }


def test_running_pods_of_the_services_are_the_targets() -> None:
    pods = [pod("b", "127.0.9.3"), pod("a", "127.0.9.2"), pod("c", "", "Pending"), pod("d", "127.0.9.4", app="x")]
    assert scrape_targets(pods) == [
        {"targets": ["127.0.9.2:8000"], "labels": {"namespace": "ns", "pod": "a"}},
        {"targets": ["127.0.9.3:8000"], "labels": {"namespace": "ns", "pod": "b"}},
    ]


def test_configuration_reads_the_targets_from_the_file() -> None:
    (job,) = configuration(Path("/x/targets.json"), 3)["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": ["/x/targets.json"]}]
