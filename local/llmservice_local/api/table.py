"""`as=Table`: the columns and rows that `kubectl get` prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from llmservice_local.kinds.catalogue import Column, Kind
from llmservice_local.objects import Object


def table(kind: Kind, objects: Iterable[Object], now: datetime, include_object: str = "Metadata") -> Object:
    """A meta.k8s.io/v1 Table. `include_object` is what each row contains: `None`, `Metadata` or `Object`."""
    builtin = BUILT_IN.get(kind.name)
    columns = builtin.columns if builtin else (kind.columns or PLAIN.columns)
    printed = []
    for obj in objects:
        if builtin or not kind.columns:
            cells = (builtin or PLAIN).cells(obj, now)
        else:
            cells = [_cell(obj, column, now) for column in columns]
        printed.append({"cells": cells, "object": _row_object(obj, include_object)})
    definitions = [
        {
            "name": column.name,
            "type": column.type if column.type != "date" else "string",
            "format": "name" if column.name == "Name" else "",
            "description": column.description,
            "priority": column.priority,
        }
        for column in columns
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {},
        "columnDefinitions": definitions,
        "rows": printed,
    }


def _row_object(obj: Object, include_object: str) -> Object | None:
    if include_object == "None":
        return None
    if include_object == "Object":
        return obj
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def _cell(obj: Mapping[str, Any], column: Column, now: datetime) -> Any:
    found = json_path(obj, column.path)
    if not found:
        return None
    if column.type == "date":
        return age(str(found[0]), now)
    value = found[0] if len(found) == 1 else ",".join(map(str, found))
    if isinstance(value, Mapping | list):
        return json.dumps(value, separators=(",", ":"))
    if column.type == "integer" and isinstance(value, int | float):
        return int(value)
    if column.type in {"number", "boolean"} and isinstance(value, int | float):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Printer:
    columns: tuple[Column, ...]
    cells: Callable[[Object, datetime], list[Any]]


def _columns(*names: str, wide: tuple[str, ...] = ()) -> tuple[Column, ...]:
    shown = tuple(Column(name, "string", "") for name in names)
    return shown + tuple(Column(name, "string", "", priority=1) for name in wide)


def age(timestamp: str | None, now: datetime) -> str:
    """The age of a timestamp in kubectl's format: `45s`, `3m2s`, `5h`, `12d`."""
    if not timestamp:
        return "<unknown>"
    moment = datetime.fromisoformat(timestamp)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = max(0, int((now - moment).total_seconds()))
    minutes, hours = seconds // 60, seconds // 3600
    steps = (
        (120, f"{seconds}s"),
        (600, f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"),
        (3 * 3600, f"{minutes}m"),
        (8 * 3600, f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"),
        (48 * 3600, f"{hours}h"),
    )
    return next((shown for below, shown in steps if seconds < below), f"{hours // 24}d")


def _created(obj: Object, now: datetime) -> str:
    return age(obj["metadata"].get("creationTimestamp"), now)


def pod_status(pod: Object) -> str:
    """The STATUS column of a pod: its phase, or the reason that a container waits or ended."""
    status = pod.get("status") or {}
    shown: str = status.get("reason") or status.get("phase") or "Pending"
    initializing = False
    inits = status.get("initContainerStatuses") or []
    for index, container in enumerate(inits):
        state = container.get("state") or {}
        if (state.get("terminated") or {}).get("exitCode") == 0:
            continue
        reason = (state.get("terminated") or state.get("waiting") or {}).get("reason")
        shown = f"Init:{reason}" if reason and reason != "PodInitializing" else f"Init:{index}/{len(inits)}"
        initializing = True
        break
    if not initializing:
        for container in reversed(status.get("containerStatuses") or []):
            state = container.get("state") or {}
            reason = (state.get("waiting") or state.get("terminated") or {}).get("reason")
            shown = reason or shown
    return "Terminating" if "deletionTimestamp" in pod["metadata"] else shown


def _pod(pod: Object, now: datetime) -> list[Any]:
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    ready = sum(bool(container.get("ready")) for container in containers)
    restarts = sum(container.get("restartCount", 0) for container in containers)
    finished = [
        moment
        for container in containers
        if (moment := ((container.get("lastState") or {}).get("terminated") or {}).get("finishedAt"))
    ]
    shown = f"{restarts} ({age(max(finished), now)} ago)" if restarts and finished else str(restarts)
    return [
        pod["metadata"]["name"],
        f"{ready}/{len(pod['spec'].get('containers') or [])}",
        pod_status(pod),
        shown,
        _created(pod, now),
        status.get("podIP") or "<none>",
        pod["spec"].get("nodeName") or "<none>",
    ]


def _deployment(obj: Object, now: datetime) -> list[Any]:
    status, containers = obj.get("status") or {}, obj["spec"]["template"]["spec"]["containers"]
    return [
        obj["metadata"]["name"],
        f"{status.get('readyReplicas', 0)}/{obj['spec'].get('replicas', 1)}",
        status.get("updatedReplicas", 0),
        status.get("availableReplicas", 0),
        _created(obj, now),
        ",".join(container["name"] for container in containers),
        ",".join(container.get("image", "") for container in containers),
    ]


def _replica_set(obj: Object, now: datetime) -> list[Any]:
    status = obj.get("status") or {}
    counts = [obj["spec"].get("replicas", 1), status.get("replicas", 0), status.get("readyReplicas", 0)]
    return [obj["metadata"]["name"], *counts, _created(obj, now)]


def _service(obj: Object, now: datetime) -> list[Any]:
    spec = obj["spec"]
    ports = ",".join(f"{port['port']}/{port.get('protocol', 'TCP')}" for port in spec.get("ports") or [])
    selector = ",".join(f"{key}={value}" for key, value in sorted((spec.get("selector") or {}).items()))
    address = spec.get("clusterIP") or "<none>"
    return [
        obj["metadata"]["name"], spec.get("type"), address, "<none>", ports or "<none>", _created(obj, now),
        selector or "<none>",
    ]  # fmt: skip


def _node(obj: Object, now: datetime) -> list[Any]:
    conditions = {condition["type"]: condition["status"] for condition in obj["status"].get("conditions") or []}
    ready = "Ready" if conditions.get("Ready") == "True" else "NotReady"
    shown = ready + (",SchedulingDisabled" if (obj.get("spec") or {}).get("unschedulable") else "")
    info = obj["status"].get("nodeInfo") or {}
    address = next((a["address"] for a in obj["status"].get("addresses") or [] if a["type"] == "InternalIP"), "<none>")
    return [obj["metadata"]["name"], shown, "<none>", _created(obj, now), info.get("kubeletVersion", ""), address]


def _event(obj: Object, now: datetime) -> list[Any]:
    involved = obj.get("involvedObject") or obj.get("regarding") or {}
    last = obj.get("lastTimestamp") or obj.get("eventTime") or obj["metadata"].get("creationTimestamp")
    return [
        age(last, now),
        obj.get("type", ""),
        obj.get("reason", ""),
        f"{involved.get('kind', '').lower()}/{involved.get('name', '')}",
        (obj.get("message") or obj.get("note") or "").strip(),
    ]


def _namespace(obj: Object, now: datetime) -> list[Any]:
    return [obj["metadata"]["name"], (obj.get("status") or {}).get("phase", "Active"), _created(obj, now)]


def _endpoints(obj: Object, now: datetime) -> list[Any]:
    addresses = [
        f"{address['ip']}:{port['port']}"
        for subset in obj.get("subsets") or []
        for address in subset.get("addresses") or []
        for port in subset.get("ports") or []
    ]
    shown = ",".join(addresses[:3]) + (f" + {len(addresses) - 3} more..." if len(addresses) > 3 else "")
    return [obj["metadata"]["name"], shown or "<none>", _created(obj, now)]


def _data(obj: Object, now: datetime) -> list[Any]:
    return [obj["metadata"]["name"], len(obj.get("data") or {}), _created(obj, now)]


def _secret(obj: Object, now: datetime) -> list[Any]:
    return [obj["metadata"]["name"], obj.get("type", "Opaque"), len(obj.get("data") or {}), _created(obj, now)]


def _lease(obj: Object, now: datetime) -> list[Any]:
    return [obj["metadata"]["name"], (obj.get("spec") or {}).get("holderIdentity", ""), _created(obj, now)]


def _webhooks(obj: Object, now: datetime) -> list[Any]:
    return [obj["metadata"]["name"], len(obj.get("webhooks") or []), _created(obj, now)]


def _definition(obj: Object, now: datetime) -> list[Any]:
    del now
    return [obj["metadata"]["name"], obj["metadata"].get("creationTimestamp")]


PLAIN = Printer(_columns("Name", "Age"), lambda obj, now: [obj["metadata"]["name"], _created(obj, now)])

BUILT_IN: dict[str, Printer] = {
    "Pod": Printer(_columns("Name", "Ready", "Status", "Restarts", "Age", wide=("IP", "Node")), _pod),
    "Deployment": Printer(
        _columns("Name", "Ready", "Up-to-date", "Available", "Age", wide=("Containers", "Images")), _deployment
    ),
    "ReplicaSet": Printer(_columns("Name", "Desired", "Current", "Ready", "Age"), _replica_set),
    "Service": Printer(
        _columns("Name", "Type", "Cluster-IP", "External-IP", "Port(s)", "Age", wide=("Selector",)), _service
    ),
    "Node": Printer(_columns("Name", "Status", "Roles", "Age", "Version", wide=("Internal-IP",)), _node),
    "Event": Printer(_columns("Last Seen", "Type", "Reason", "Object", "Message"), _event),
    "Namespace": Printer(_columns("Name", "Status", "Age"), _namespace),
    "Endpoints": Printer(_columns("Name", "Endpoints", "Age"), _endpoints),
    "ConfigMap": Printer(_columns("Name", "Data", "Age"), _data),
    "Secret": Printer(_columns("Name", "Type", "Data", "Age"), _secret),
    "Lease": Printer(_columns("Name", "Holder", "Age"), _lease),
    "ValidatingWebhookConfiguration": Printer(_columns("Name", "Webhooks", "Age"), _webhooks),
    "CustomResourceDefinition": Printer(_columns("Name", "Created At"), _definition),
}


_STEP = re.compile(
    r"""
    \.(?P<field>(?:[^.\[\]\\]|\\.)+)
    | \[\?\(\s*@\.(?P<key>[^=\s]+)\s*==\s*(?P<quote>['"])(?P<value>.*?)(?P=quote)\s*\)\]
    | \[(?P<star>\*)\]
    | \[(?P<index>-?\d+)\]
    | \[(?P<name_quote>['"])(?P<name>.*?)(?P=name_quote)\]
    """,
    re.VERBOSE,
)


def json_path(obj: Any, path: str) -> list[Any]:
    """All values at a path such as `.status.conditions[?(@.type=="Ready")].status`.

    Supports fields, indexes, wildcards and equality filters; raises `ValueError` on other syntax.
    """
    values = [obj]
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise ValueError(f"JSONPath {path!r}: cannot read {path[at:]!r}")
        values = [found for value in values for found in _step(value, match)]
        at = match.end()
    return values


def _step(value: Any, match: re.Match[str]) -> list[Any]:
    name = match["field"] or match["name"]
    if name is not None:
        name = name.replace("\\.", ".")
        if isinstance(value, Mapping) and value.get(name) is not None:
            return [value[name]]
        return []
    if match["star"]:
        return list(value.values()) if isinstance(value, Mapping) else list(value or [])
    if not isinstance(value, list):
        return []
    if match["index"]:
        index = int(match["index"])
        return [value[index]] if -len(value) <= index < len(value) else []
    return [item for item in value if str(_field(item, match["key"])) == match["value"]]


def _field(item: Any, dotted: str) -> Any:
    for step in dotted.split("."):
        item = item.get(step) if isinstance(item, Mapping) else None
    return item
