"""The alerts before a real Prometheus' own judge, promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from llmservice_operator.monitoring.alerts import rule_file, service_groups

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "charts" / "llmservice" / "files" / "alerts.yaml"
UNIT_TESTS = HERE / "alerts_test.yaml"

TARGETS_S = {"slow": 2.0, "calm": 6.0, "idle": 2.0}
"""The p99 TTFT targets of the unit tests' services."""

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)")


def promtool(*arguments: str | Path, folder: Path) -> str:
    assert PROMTOOL is not None
    result = subprocess.run(
        [PROMTOOL, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    return output


@needs_promtool
def test_promtool_finds_no_fault_with_the_rules() -> None:
    number = sum(len(group["rules"]) for group in rule_file()["groups"])
    assert f"{number} rules found" in promtool("check", "rules", RULES, folder=HERE)


@needs_promtool
@pytest.mark.parametrize("name", ["llama3-8b", 'x"} or vector(1) or up{job="', "\\", "a\nb", "{{ $labels.x }}"])
def test_promtool_finds_no_fault_with_the_rules_of_one_service(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": service_groups("ns", name, 0.25)}), encoding="utf-8")
    promtool("check", "rules", path, folder=tmp_path)


@pytest.mark.slow
@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(UNIT_TESTS, tmp_path)
    promtool("test", "rules", UNIT_TESTS.name, folder=tmp_path)


@pytest.mark.slow
@needs_promtool
def test_rules_of_single_services_say_the_same_as_those_of_the_cluster(tmp_path: Path) -> None:
    """The same unit tests, each with the PrometheusRules of the services in it instead of the cluster's rules."""
    head, *tests = re.split(r"(?m)^(?=  - name:)", UNIT_TESTS.read_text(encoding="utf-8"))
    others = [group for group in rule_file()["groups"] if group["name"] != "llmservice-services"]
    files = []
    for number, test in enumerate(tests):
        names = set(re.findall(r'(?:service|name)="(\w+)"', test)) - {"operator"}
        groups = [group for name in names for group in service_groups("ns", name, TARGETS_S.get(name))]
        rules, files = f"rules-{number}.yaml", [*files, f"test-{number}.yaml"]
        (tmp_path / rules).write_text(yaml.safe_dump({"groups": groups + others}), encoding="utf-8")
        (tmp_path / files[-1]).write_text(head.replace(RULES.name, rules) + test, encoding="utf-8")
    promtool("test", "rules", *files, folder=tmp_path)


def test_every_alert_is_seen_to_fire_and_to_hold_its_peace() -> None:
    cases = [
        case
        for test in yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]
        for case in test["alert_rule_test"]
    ]
    for rule in (rule for group in rule_file()["groups"] for rule in group["rules"]):
        seen = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]}
        assert seen == {True, False}, rule["alert"]
