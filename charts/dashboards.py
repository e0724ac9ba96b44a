"""Write the chart's Grafana dashboards: what a service does for its users, how its engines fare, why it scales.

    python charts/dashboards.py

Throughput stands beside latency everywhere: neither says anything alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import dashboard_autoscaler
import dashboard_engine
import dashboard_service
from grafana import dashboard

FOLDER = Path(__file__).parent / "llmservice" / "files" / "dashboards"
MODULES: dict[str, ModuleType] = {
    "service": dashboard_service,
    "engine": dashboard_engine,
    "autoscaler": dashboard_autoscaler,
}


def outputs() -> dict[Path, str]:
    """What the generated files should hold now; a dashboard's description is its module's first line."""
    found = {}
    for name, module in MODULES.items():
        content = dashboard(f"llmservice-{name}", f"LLM / {name.title()}", module.__doc__ or "", module.ROWS)
        found[FOLDER / f"{name}.json"] = json.dumps(content, indent=1) + "\n"
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
