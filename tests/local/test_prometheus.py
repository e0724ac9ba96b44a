from __future__ import annotations

from pathlib import Path
from typing import Any

from llmservice_local.prometheus import configuration, scrape_targets


def pod(name: str, ip: str, phase: str = "Running", app: str = "llmservice") -> dict[str, Any]:
    ports = [{"name": "other", "containerPort": 1}, {"name": "metrics", "containerPort": 8001}]
    labels = {"app.kubernetes.io/name": app, "app.kubernetes.io/instance": "service"}
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": labels},
        "spec": {"containers": [{"name": "server", "ports": ports}]},
        "status": {"phase": phase, "podIP": ip},
    }


def test_running_pods_of_the_services_are_the_targets() -> None:
    pods = [pod("b", "127.0.9.3"), pod("a", "127.0.9.2"), pod("c", "", "Pending"), pod("d", "127.0.9.4", app="x")]
    assert [(target["targets"], target["labels"]["pod"]) for target in scrape_targets(pods)] == [
        (["127.0.9.2:8001"], "a"),
        (["127.0.9.3:8001"], "b"),
    ]


def test_series_of_a_pod_have_the_labels_that_its_pod_monitor_would_give_them() -> None:
    (target,) = scrape_targets([pod("a", "127.0.9.2")])
    assert target["labels"] == {
        "namespace": "ns",
        "pod": "a",
        "container": "server",
        "endpoint": "metrics",
        "job": "ns/service",
        "service": "service",
    }


def test_configuration_reads_the_targets_from_the_file_and_loads_the_alerts() -> None:
    config = configuration(Path("/x/targets.json"), {}, 3)
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": ["/x/targets.json"]}]
    assert config["rule_files"] == ["alerts.yaml"]


def test_operators_own_namespace_label_is_kept_for_it_names_the_services() -> None:
    _, operator, gateway = configuration(Path("/x"), {"operator": "127.0.0.1:1", "gateway": "127.0.0.1:2"})[
        "scrape_configs"
    ]
    assert operator["static_configs"][0]["targets"] == ["127.0.0.1:1"]
    assert operator["honor_labels"] is True
    assert "honor_labels" not in gateway
