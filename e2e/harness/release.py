"""The chart's own accounts and roles for operator and gateway, and whether they were enough."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python as helm

CHART = Path(__file__).parents[2] / "charts" / "llmservice"
NAMESPACE = "llmservice-system"
ONE_OF_EACH: Mapping[str, Any] = {"operator": {"replicas": 1}, "gateway": {"replicas": 1}}
"""A laptop's worth; what is about several operators asks for them."""


def write_release(path: Path, values: Mapping[str, Any]) -> Path:
    """What `helm template` would print; `values` replace whole top-level keys."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render({**ONE_OF_EACH, **values}, name="llmservice", namespace=NAMESPACE)
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    path.write_text("\n---\n".join(texts), encoding="utf-8")
    return path


def assert_nothing_was_forbidden(state_dir: Path, *accounts: str) -> None:
    """By the API server's audit log, which outlives killed processes, and which must mention each account."""
    lines = (state_dir / "audit.log").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    users = {event["user"]["username"].rpartition(":")[2] for event in events}
    assert users == set(accounts)
    refused = {_refusal(event) for event in events} - {""}
    assert not refused, f"the chart's roles are too narrow: {sorted(refused)}"


def _refusal(event: Mapping[str, Any]) -> str:
    """What the roles forbade; quotas and admission refuse with the same code, but in other words."""
    status = event.get("responseStatus") or {}
    message = str(status.get("message", ""))
    return message if status.get("code") == 403 and "forbidden: User " in message else ""
