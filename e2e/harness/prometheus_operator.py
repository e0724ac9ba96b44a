"""The CRDs of the Prometheus operator, as far as this project fills them: types, required fields, defaults, list kinds.

The full ones: https://github.com/prometheus-operator/prometheus-operator/tree/main/example/prometheus-operator-crd
"""

from __future__ import annotations

from typing import Any

from harness import definitions

Schema = dict[str, Any]

GROUP, VERSION = "monitoring.coreos.com", "v1"
DURATION: Schema = {"type": "string", "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"}  # fmt: skip  # noqa: E501 - the CRD's own
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_RELABELING = _object(
    action=TEXT | {"default": "replace"},
    sourceLabels=_list(TEXT),
    targetLabel=TEXT,
    regex=TEXT,
    replacement=TEXT,
)
_ENDPOINT = _object(
    port=TEXT, path=TEXT, interval=DURATION, honorLabels={"type": "boolean"}, relabelings=_list(_RELABELING)
)
_SELECTOR = _object(matchLabels=TEXTS)
_RULE = _object(
    "expr",
    alert=TEXT,
    expr={"x-kubernetes-int-or-string": True},
    labels=TEXTS,
    annotations=TEXTS,
    keep_firing_for=DURATION,
    **{"for": DURATION},
)
_GROUP = _object("name", name=TEXT | {"minLength": 1}, interval=DURATION, rules=_list(_RULE))

SPECS: dict[str, Schema] = {
    "PodMonitor": _object("selector", "podMetricsEndpoints", selector=_SELECTOR, podMetricsEndpoints=_list(_ENDPOINT)),
    "ServiceMonitor": _object("selector", "endpoints", selector=_SELECTOR, endpoints=_list(_ENDPOINT)),
    "PrometheusRule": _object(
        groups=_list(_GROUP) | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    ),
}


def plural(kind: str) -> str:
    return f"{kind.lower()}s"


def definition(kind: str) -> dict[str, Any]:
    """A CRD whose API server refuses what the real one's would."""
    return definitions.definition(GROUP, kind, _object("spec", spec=SPECS[kind]))
