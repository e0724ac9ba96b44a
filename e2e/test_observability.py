"""A real Prometheus with the chart's rules and dashboards: every query finds its series, p99 TTFT raises an alert."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import LLMSERVICE, Cluster, processes, running_cluster
from harness.kube import Kube, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAME, SCALED = "slow", "scaled"
DASHBOARDS = Path(__file__).parents[1] / "charts" / "llmservice" / "files" / "dashboards"
EMPTY_WHEN_ALL_IS_WELL = {
    "Conditions that are not as they should be",
    *("Affinity hit rate", "Passed to another pod"),
    *("Requests by key, model and code", "Tokens by key", "Refused by a limit"),
    *("Held now", "Time that requests were held", "Wake-ups"),
}
LABELLED_BY_CHANCE = {
    "llmservice_operator_pass_failures_total",
    "llmservice_gateway_held_seconds_count",
    "llmservice_request_rejected_total",
}
"""Has no series before the first failure; a rule's unit test shows the labels."""
ALERT = "LLMServiceTTFTOverTarget"
SOONER = {"[1m]": "[20s]", "for: 1m": "for: 4s"}
"""The alerts' minutes, so that a test need not wait for them; tests/charts/alerts_test.yaml has the real ones."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(420),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="asks the local cluster's Prometheus"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus on the PATH"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One replica that can't be scaled out of its trouble, with a target that no request meets."""
    directory: Path = tmp_path_factory.mktemp("alerts")
    with running_cluster(directory, "--prometheus") as running:
        kube = Kube(running)
        kube.create(tiny_service(NAME, running.model_uri, slo={"ttftP99": "1ms"}))
        kube.create(tiny_service(SCALED, running.model_uri, autoscaling={"maxReplicas": 1}, slo={"ttftP99": "5s"}))
        for name in (NAME, SCALED):
            kube.wait_condition(name, "Ready", "True", timeout_s=90)
        alert_sooner(running)
        yield running


def alert_sooner(cluster: Cluster) -> None:
    rules = cluster.state_dir / "state" / "prometheus" / "alerts.yaml"
    text = rules.read_text(encoding="utf-8")
    for minutes, seconds in SOONER.items():
        assert minutes in text
        text = text.replace(minutes, seconds)
    rules.write_text(text, encoding="utf-8")
    started = f"{shutil.which('prometheus')} --config.file={rules.parent}"
    (prometheus,) = [pid for pid, command in processes() if command.startswith(started)]
    os.kill(prometheus, signal.SIGHUP)


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


def test_servers_and_operator_speak_of_the_same_services(cluster: Cluster) -> None:
    def series(metric: str, label: str) -> dict[tuple[str, str], str]:
        result = ask(cluster, "query", query=metric)["result"]
        return {(each["metric"]["namespace"], each["metric"][label]): each["value"][1] for each in result}

    targets = {("default", NAME): "0.001", ("default", SCALED): "5"}
    wait_for(lambda: series("llmservice_operator_ttft_target_seconds", "name") == targets, 30)
    wait_for(lambda: series("llmservice_num_requests_running", "service").keys() == targets.keys(), 30)


def test_check_that_helm_test_runs_names_what_the_gateway_serves(cluster: Cluster) -> None:
    checked = subprocess.run(
        [LLMSERVICE, "check", cluster.gateway_url], capture_output=True, text=True, timeout=90, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert f"serves {SCALED}, {NAME}" in checked.stdout


def test_metrics_of_every_rule_are_scraped(cluster: Cluster) -> None:
    def unscraped() -> set[str]:
        rules = [rule for group in ask(cluster, "rules")["groups"] for rule in group["rules"]]
        names = {name for rule in rules for name in re.findall(r"llmservice_\w+", rule["query"])}
        return {name for name in names - LABELLED_BY_CHANCE if not ask(cluster, "query", query=name)["result"]}

    wait_for(lambda: unscraped() == set(), 30, unscraped)


def test_every_query_of_the_dashboards_finds_series_with_the_labels_that_its_legend_names(cluster: Cluster) -> None:
    work_a_little(cluster)
    wait_for(lambda: unanswered(cluster) == [], 40, lambda: unanswered(cluster))


def work_a_little(cluster: Cluster) -> None:
    """Requests of each kind that a dashboard counts: answered, embedded, refused."""
    with traffic(cluster.gateway_url, SCALED, rate=10, output_tokens=8) as load:
        wait_for(lambda: len(load.records) >= 20 or None, 60)
    for path, body in (
        ("embeddings", {"model": SCALED, "input": "hello"}),
        ("completions", {"model": SCALED, "prompt": "hello", "max_tokens": -1}),
    ):
        request = urllib.request.Request(  # noqa: S310 - our own gateway
            f"{cluster.gateway_url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30).close()  # noqa: S310 - likewise


def unanswered(cluster: Cluster) -> list[str]:
    """Queries without a result, or whose results lack a label that the legend shows."""
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                result = ask(cluster, "query", query=executable(target["expr"]))["result"]
                labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                complete = all(labels <= series["metric"].keys() for series in result)
                if not complete or not (result or panel["title"] in EMPTY_WHEN_ALL_IS_WELL):
                    found.append(f"{path.stem}: {panel['title']}: {target['expr']}")
    return found


def executable(expr: str) -> str:
    """A panel's query with the variables filled in as Grafana does for `All`."""
    for variable, value in (("$__rate_interval", "1m"), ("$__range", "5m"), ("$namespace", ".*"), ("$service", ".*")):
        expr = expr.replace(variable, value)
    return expr


def test_p99_ttft_alert_fires_under_load_and_resolves_after_it(cluster: Cluster) -> None:
    assert firing(cluster) == []
    with traffic(cluster.gateway_url, NAME, rate=5, output_tokens=4) as load:
        wait_for(lambda: firing(cluster) or None, 90, lambda: ask(cluster, "alerts"))
    assert {"alertname": ALERT, "namespace": "default", "service": NAME, "severity": "critical"} in firing(cluster)
    assert load.failures == []
    wait_for(lambda: firing(cluster) == [], 90, lambda: firing(cluster))
