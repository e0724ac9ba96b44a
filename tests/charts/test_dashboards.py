"""The dashboards as files: what Grafana would refuse or a person would miss. Their metrics are checked end to end."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

import dashboards

CHART = dashboards.FOLDER.parents[1]
UNITS = {"s", "short", "none", "percent", "percentunit", "bytes", "ops", "reqps"}
ALL = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(dashboards.FOLDER.glob("*.json"))}

Panel = dict[str, Any]


def panels_of(board: dict[str, Any]) -> list[Panel]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


EVERY_PANEL = [pytest.param(panel, id=f"{name}: {panel['title']}") for name in ALL for panel in panels_of(ALL[name])]


def test_files_are_current() -> None:
    outputs = dashboards.outputs()
    assert {path.stem for path in outputs} == ALL.keys()
    for path, text in outputs.items():
        assert path.read_text(encoding="utf-8") == text, "run `make chart`"


@pytest.mark.parametrize("board", ALL.values(), ids=ALL)
def test_panels_are_told_apart_and_do_not_overlap(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels_of(board)}) == len(panels_of(board))
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


@pytest.mark.parametrize("board", ALL.values(), ids=ALL)
def test_variables_are_those_that_the_queries_use(board: dict[str, Any]) -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panel["targets"] for panel in panels_of(board)])))
    used -= {"__rate_interval", "__range", "1"}  # $1 is label_replace's own
    assert {variable["name"] for variable in board["templating"]["list"]} == used


def test_services_are_chosen_by_what_their_dashboard_reads() -> None:
    """What never came up has no servers to scrape, and is found on the autoscaler's dashboard all the same."""
    asked = {name: board["templating"]["list"][-1]["query"] for name, board in ALL.items()}
    assert asked["service"] == asked["engine"]
    assert "llmservice_num_requests_running" in asked["service"]["query"]
    assert "llmservice_operator_desired_replicas" in asked["autoscaler"]["query"]


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: Panel) -> None:
    assert len(panel["description"]) > 10
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("board", ALL.values(), ids=ALL)
def test_p99_never_stands_alone_and_throughput_stands_beside_latency(board: dict[str, Any]) -> None:
    for panel in panels_of(board):
        legends = " ".join(target["legendFormat"] for target in panel["targets"])
        assert ("p99" in legends) == ("p50" in legends), panel["title"]
    units = {panel["fieldConfig"]["defaults"]["unit"] for panel in panels_of(board)}
    assert "s" in units
    assert units & {"short", "reqps"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)")
@pytest.mark.parametrize("name", ALL)
def test_promtool_can_parse_every_query(name: str, tmp_path: Path) -> None:
    targets = [target for panel in panels_of(ALL[name]) for target in panel["targets"]]
    exprs = [re.sub(r"\$__(rate_interval|range)", "1m", target["expr"]) for target in targets]
    rules = [{"record": f"query_{number}", "expr": expr} for number, expr in enumerate(exprs)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    result = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)")
def test_conditions_of_a_service_that_is_well_are_not_shown(tmp_path: Path) -> None:
    (expr,) = (
        target["expr"]
        for panel in panels_of(ALL["autoscaler"])
        if panel["title"] == "Conditions that are not as they should be"
        for target in panel["targets"]
    )
    well = {"Ready": 1, "Progressing": 0, "Stalled": 0, "ScalingActive": 0, "GatewayOnly": 0, "SLOFeasible": -1}
    services = {
        "well": (1, well),
        "asleep": (0, well | {"Ready": 0}),
        "away": (1, well | {"Ready": 0}),
        "taken": (1, well | {"NameTaken": 1}),
    }
    unit = {
        "input_series": [
            {"series": f'llmservice_operator_condition{{namespace="a",name="{name}",type="{kind}"}}', "values": value}
            for name, (_, kinds) in services.items()
            for kind, value in kinds.items()
        ]
        + [
            {"series": f'llmservice_operator_desired_replicas{{namespace="a",name="{name}"}}', "values": desired}
            for name, (desired, _) in services.items()
        ],
        "promql_expr_test": [
            {
                "expr": expr.replace("$namespace", ".*").replace("$service", ".*"),
                "eval_time": "0m",
                "exp_samples": [
                    {"labels": '{namespace="a",name="away",type="Ready"}', "value": 1},
                    {
                        "labels": 'llmservice_operator_condition{namespace="a",name="taken",type="NameTaken"}',
                        "value": 1,
                    },
                ],
            }
        ],
    }
    path = tmp_path / "unit.yaml"
    path.write_text(yaml.safe_dump({"tests": [unit]}), encoding="utf-8")
    result = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_chart_brings_them_as_config_maps_that_the_sidecar_finds() -> None:
    with helm.Chart.load(CHART) as chart:
        values = {"dashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}}}
        text = chart.render(values, name="release", namespace="system")["llmservice/templates/dashboards.yaml"]
        off = chart.render({}, name="release", namespace="system")["llmservice/templates/dashboards.yaml"]
    assert not off.strip()
    maps = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    for manifest in maps:
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert manifest["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    shipped = {name: json.loads(content) for manifest in maps for name, content in manifest["data"].items()}
    assert shipped == {f"llmservice-{name}.json": board for name, board in ALL.items()}
