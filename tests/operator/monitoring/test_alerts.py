from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llmservice_operator.alerts_command import CHART_FILE, alerts_yaml
from llmservice_operator.monitoring.alerts import rule_file, service_groups
from llmservice_planner.command import main

ROOT = Path(__file__).parents[3]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")


def rules(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for group in groups for rule in group["rules"]]


ALL = rules(rule_file()["groups"])


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: str(rule["alert"]))
def test_every_alert_has_a_section_in_the_runbook(rule: dict[str, Any]) -> None:
    section = re.search(rf"^## {rule['alert']}\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE)
    assert section, f"docs/runbook.md has no section {rule['alert']}"
    assert all(f"**{heading}**" in section[1] for heading in ("Means", "Look at", "Do"))
    assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_runbook_has_no_section_without_an_alert() -> None:
    assert set(re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)) == {rule["alert"] for rule in ALL}


def test_alerts_of_one_service_are_those_of_the_cluster_narrowed_to_it() -> None:
    everywhere = {rule["alert"]: rule for rule in rules(rule_file()["groups"][:1])}
    own = {rule["alert"]: rule for rule in rules(service_groups("ns", "chat", 2.5))}
    assert own.keys() == everywhere.keys()
    for name, rule in own.items():
        assert 'namespace="ns"' in rule["expr"]
        assert "chat" in rule["expr"]
        assert rule | {"expr": ""} == everywhere[name] | {"expr": ""}


def test_the_rule_of_a_service_has_its_target() -> None:
    latency = rules(service_groups("ns", "chat", 0.08))[0]
    assert latency["alert"] == "LLMServiceTTFTOverTarget"
    assert latency["expr"].endswith(" > 0.08")


def test_without_a_target_nothing_is_missed() -> None:
    names = {rule["alert"] for rule in rules(service_groups("ns", "chat", None))}
    assert "LLMServiceTTFTOverTarget" not in names
    assert "LLMServiceNotReady" in names


def test_a_hostile_name_cannot_leave_its_quotes() -> None:
    name = 'x"} or vector(1) or up{job="'
    for rule in rules(service_groups(name, name, 1.0)):
        assert name not in rule["expr"]
        assert "vector(1)" not in re.sub(r'"(\\.|[^"\\])*"', '""', rule["expr"])


def test_charts_copy_is_current() -> None:
    assert (ROOT / CHART_FILE).read_text(encoding="utf-8") == alerts_yaml(), "run `make chart`"


def test_command_prints_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts"]) == 0
    assert capsys.readouterr().out == alerts_yaml()


def test_write_outside_of_the_repository_says_where_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["alerts", "--write"]) == 2
    assert "repository's root" in capsys.readouterr().err
