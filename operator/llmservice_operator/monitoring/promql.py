"""PromQL out of names that others chose: nothing reaches a query unescaped."""

from __future__ import annotations


def string(text: str) -> str:
    """A PromQL string literal (https://prometheus.io/docs/prometheus/latest/querying/basics/#string-literals)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def matchers(**labels: str) -> str:
    """What stands between the braces of a selector: equality of every label, nothing without labels."""
    return ",".join(f"{label}={string(value)}" for label, value in labels.items())


def selector(metric: str, *inside: str) -> str:
    """`metric{inside}`; empty parts are left out."""
    parts = ",".join(part for part in inside if part)
    return f"{metric}{{{parts}}}" if parts else metric
