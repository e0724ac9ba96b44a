"""A real Prometheus with the chart's rules: the alert on p99 TTFT fires when the load says so, and resolves."""

from __future__ import annotations

import json
import os
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAME = "slow"
ALERT = "LLMServiceTTFTOverTarget"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(420),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="asks the local cluster's Prometheus"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus on the PATH"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One replica that can't be scaled out of its trouble, and a promise that only an idle server keeps."""
    directory: Path = tmp_path_factory.mktemp("alerts")
    with running_cluster(directory, "--prometheus") as running:
        kube = Kube(running)
        kube.create(tiny_service(NAME, running.model_uri, slo={"ttftP99": "500ms"}))
        kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
        yield running


def ask(cluster: Cluster, path: str, **query: str) -> Any:
    """The data of an answer of Prometheus' HTTP API."""
    url = f"{cluster.prometheus_url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own Prometheus
        answer = json.load(response)
    assert answer["status"] == "success", answer
    return answer["data"]


def firing(cluster: Cluster) -> list[dict[str, str]]:
    alerts = ask(cluster, "alerts")["alerts"]
    return [alert["labels"] for alert in alerts if alert["state"] == "firing"]


def test_prometheus_loads_every_rule_and_evaluates_it_without_error(cluster: Cluster) -> None:
    def evaluated() -> list[dict[str, Any]] | None:
        rules = [rule for group in ask(cluster, "rules")["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else None

    rules = wait_for(evaluated, 30)
    assert ALERT in {rule["name"] for rule in rules}
    assert [rule.get("lastError") for rule in rules if rule["health"] != "ok"] == []


def test_metrics_that_the_rules_read_are_there_with_the_labels_of_their_service(cluster: Cluster) -> None:
    def reported() -> Any:
        return ask(cluster, "query", query="llmservice_operator_ttft_target_seconds")["result"]

    (target,) = wait_for(reported, 30)
    assert target["metric"]["namespace"] == "default"
    assert target["metric"]["name"] == NAME
    assert target["value"][1] == "0.5"
    (running,) = ask(cluster, "query", query="llmservice_num_requests_running")["result"]
    assert (running["metric"]["namespace"], running["metric"]["service"]) == ("default", NAME)


def test_p99_ttft_alert_fires_under_load_and_resolves_after_it(cluster: Cluster) -> None:
    assert firing(cluster) == []
    with traffic(cluster.gateway_url, NAME, rate=60, output_tokens=60) as load:
        wait_for(lambda: firing(cluster) or None, 180, lambda: ask(cluster, "alerts"))
    assert {"alertname": ALERT, "namespace": "default", "service": NAME, "severity": "critical"} in firing(cluster)
    assert load.failures == []
    wait_for(lambda: firing(cluster) == [], 120, lambda: firing(cluster))
