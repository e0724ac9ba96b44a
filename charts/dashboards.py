"""Write the chart's Grafana dashboards: what a service does for its users, how its engines fare, what the gateway
does, why services scale.

    python charts/dashboards.py

Throughput stands beside latency everywhere: neither says anything alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import dashboard_autoscaler
import dashboard_engine
import dashboard_gateway
import dashboard_service
from grafana import OPERATOR, SERVERS, Row, dashboard

FOLDER = Path(__file__).parent / "llmservice" / "files" / "dashboards"
BOARDS: dict[str, tuple[tuple[Row, ...], str | None, tuple[str, str] | None]] = {
    "service": (dashboard_service.ROWS, dashboard_service.__doc__, SERVERS),
    "engine": (dashboard_engine.ROWS, dashboard_engine.__doc__, SERVERS),
    "gateway": (dashboard_gateway.ROWS, dashboard_gateway.__doc__, None),
    "autoscaler": (dashboard_autoscaler.ROWS, dashboard_autoscaler.__doc__, OPERATOR),
}
"""Panels, what they are about, and the metric and label that name the services to choose from; the gateway's series
name none."""


def outputs() -> dict[Path, str]:
    """What the generated files should hold now."""
    found = {}
    for name, (rows, description, services) in BOARDS.items():
        content = dashboard(f"llmservice-{name}", f"LLM / {name.title()}", description or "", rows, services)
        found[FOLDER / f"{name}.json"] = json.dumps(content, indent=1) + "\n"
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
