"""Writes the tables of docs/metrics.md from the registries themselves: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from llmservice_gateway.metrics import GatewayMetrics
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_server.ipc.metrics import Metrics

PAGE = Path(__file__).with_name("metrics.md")
_TABLE = r"(<!-- {house} -->\n).*?(<!-- end -->)"


def registries() -> dict[str, CollectorRegistry]:
    """What each house exposes, as it begins."""
    server = Metrics("llmservice_", "model")
    return {"server": server.registry, "gateway": GatewayMetrics().registry, "operator": OperatorMetrics().registry}


def table(registry: CollectorRegistry) -> str:
    """One row a metric, under the name that it is exposed by."""
    labels = dict(_labelled(registry))
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(registry.collect(), key=lambda one: one.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        named = labels.get(family.name) or {key for sample in family.samples for key in sample.labels} - {"le"}
        shown = ", ".join(f"`{label}`" for label in sorted(named))
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation.rstrip('.')}. |")
    return "\n".join(rows) + "\n"


def _labelled(registry: CollectorRegistry) -> list[tuple[str, tuple[str, ...]]]:
    """Labels of metrics that have no series yet: only the collectors themselves know them."""
    collectors = registry._collector_to_names
    return [(one._name, tuple(one._labelnames)) for one in collectors if isinstance(one, MetricWrapperBase)]


def page(text: str) -> str:
    """The page with its tables made anew."""
    for house, registry in registries().items():
        pattern = re.compile(_TABLE.format(house=house), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{PAGE.name} has no table between `<!-- {house} -->` and `<!-- end -->`")
        made = table(registry)
        text = pattern.sub(rf"\g<1>{made}\g<2>", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
