"""Grafana's dashboard JSON out of panels that say no more than they mean.

Queries may use the variables `$datasource` and, where a dashboard is about services, `$namespace` and `$service`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

Json = dict[str, Any]

WIDTH, HEIGHT = 24, 8
SERVERS = ("llmservice_num_requests_running", "service")
"""Metric and label that tell which services have servers; what never came up is known to the operator only."""
OPERATOR = ("llmservice_operator_desired_replicas", "name")
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A query and what its lines are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time, or with `single` the present value as a number."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    thresholds: tuple[tuple[float, str], ...] = ()
    """From this value on, this colour."""
    stacked: bool = False
    single: bool = False

    def json(self, number: int, place: Json) -> Json:
        return {
            "id": number,
            "type": "stat" if self.single else "timeseries",
            "title": self.title,
            "description": self.description,
            "datasource": _DATASOURCE,
            "gridPos": place,
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _STAT_OPTIONS if self.single else _GRAPH_OPTIONS,
            "targets": [
                {"refId": chr(ord("A") + at), "datasource": _DATASOURCE, "expr": one.expr, "legendFormat": one.legend}
                for at, one in enumerate(self.queries)
            ],
        }

    def _defaults(self) -> Json:
        first: Json = {"color": "green", "value": None}
        steps = [first, *({"color": color, "value": value} for value, color in self.thresholds)]
        defaults: Json = {"unit": self.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.single:
            return defaults | {"color": {"mode": "thresholds"}}
        custom: Json = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if self.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if self.thresholds else "off"},
        }
        return defaults | {"color": {"mode": "palette-classic"}, "custom": custom}


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side under a heading."""

    title: str
    panels: tuple[Panel, ...]


_DATASOURCES: Json = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "multi": False,
    "includeAll": False,
    "hide": 0,
}
_STAT_OPTIONS: Json = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
    "textMode": "auto",
}
_GRAPH_OPTIONS: Json = {
    "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max", "lastNotNull"]},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def dashboard(uid: str, title: str, description: str, rows: Sequence[Row], services: tuple[str, str] | None) -> Json:
    """A dashboard with the variables that its queries use.

    `services` is the metric and label that name services; None where the queries do not choose among them.
    """
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["llmservice"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_DATASOURCES, *(_variables(*services) if services else ())]},
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "tags": ["llmservice"], "title": "LLM", "keepTime": True, "includeVars": True}
        ],
        "panels": _panels(rows),
    }


def _variables(metric: str, label: str) -> list[Json]:
    return [
        _label_variable("namespace", "Namespace", f"label_values({metric}, namespace)"),
        _label_variable("service", "Service", f'label_values({metric}{{namespace=~"$namespace"}}, {label})'),
    ]


def _label_variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # as the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _panels(rows: Sequence[Row]) -> list[Json]:
    """Rows one below the other, their panels of equal width."""
    found: list[Json] = []
    numbers, y = count(1), 0
    for row in rows:
        place: Json = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        heading: Json = {"id": next(numbers), "type": "row", "title": row.title, "collapsed": False, "panels": []}
        found.append(heading | {"gridPos": place})
        width = WIDTH // len(row.panels)
        height = 4 if all(panel.single for panel in row.panels) else HEIGHT
        for at, panel in enumerate(row.panels):
            place = {"x": at * width, "y": y + 1, "w": width, "h": height}
            found.append(panel.json(next(numbers), place))
        y += 1 + height
    return found
