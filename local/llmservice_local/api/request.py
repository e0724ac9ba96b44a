"""Parses the path and the query parameters of an API request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmservice_local.api.registry import DeleteOptions, WriteOptions
from llmservice_local.errors import ApiError, bad_request
from llmservice_local.kinds.catalogue import Kind, Kinds

_SUBRESOURCES = {
    "Pod": frozenset({"log", "binding", "eviction"}),
    "Namespace": frozenset({"finalize"}),
    "ServiceAccount": frozenset({"token"}),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A kind's collection, an object of it, or a subresource of that object."""

    kind: Kind
    namespace: str | None = None
    name: str = ""
    subresource: str = ""


def parse_path(kinds: Kinds, path: str) -> Target:
    """The target of a path such as `/apis/apps/v1/namespaces/default/deployments/web/scale`; raises `ApiError` 404."""
    steps = [step for step in path.split("/") if step]
    if len(steps) >= 3 and steps[0] == "api":
        group, version, rest = "", steps[1], steps[2:]
    elif len(steps) >= 4 and steps[0] == "apis":
        group, version, rest = steps[1], steps[2], steps[3:]
    else:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    namespace: str | None = None
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    kind = kinds.find(group, version, rest[0])
    if len(rest) > 3 or (namespace is not None and not kind.namespaced):
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    target = Target(kind, namespace, *rest[1:])
    served = {"", *(["status"] if kind.has_status else []), *(["scale"] if kind.scale else [])}
    served |= _SUBRESOURCES.get(kind.name, frozenset())
    if target.subresource not in served:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return target


def write_options(query: Mapping[str, str], user_agent: str, *, apply: bool = False) -> WriteOptions:
    """The options of a write. Without `fieldManager`, the manager is the user agent up to its slash."""
    validation = query.get("fieldValidation") or "Warn"
    if validation not in {"Ignore", "Warn", "Strict"}:
        raise bad_request(f"fieldValidation {validation!r} is unknown: expected Ignore, Warn or Strict")
    manager = query.get("fieldManager", "")
    if apply and not manager:
        message = 'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required for apply patch'
        raise ApiError(422, "Invalid", message)
    return WriteOptions(
        manager=manager or user_agent.partition("/")[0] or "unknown",
        force=is_set(query, "force"),
        field_validation=validation,
        dry_run=_dry_run(query.get("dryRun")),
    )


def delete_options(query: Mapping[str, str], body: Mapping[str, Any]) -> DeleteOptions:
    """The options of a delete: from the body (`DeleteOptions`), else from the query."""
    propagation = body.get("propagationPolicy") or query.get("propagationPolicy") or "Background"
    if propagation not in {"Background", "Foreground", "Orphan"}:
        raise bad_request(f"propagationPolicy {propagation!r} is unknown: expected Background, Foreground or Orphan")
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    try:
        grace_s = None if grace is None else max(0, int(grace))
    except ValueError as error:
        raise bad_request(f"gracePeriodSeconds {grace!r} is not a number of seconds") from error
    preconditions = body.get("preconditions") or {}
    dry_run = body.get("dryRun") or query.get("dryRun")
    return DeleteOptions(
        propagation,
        grace_s,
        preconditions.get("uid"),
        preconditions.get("resourceVersion"),
        _dry_run(dry_run[0] if isinstance(dry_run, list) else dry_run),
    )


def resource_version(query: Mapping[str, str]) -> int | None:
    """The revision to start from; None if the client accepts any (`0` or absent)."""
    value = query.get("resourceVersion") or "0"
    if not value.isdigit():
        raise bad_request(f"resourceVersion {value!r} is invalid: expected one that this server gave")
    return int(value) or None


def is_set(query: Mapping[str, str], name: str) -> bool:
    """Whether a boolean parameter is true."""
    return query.get(name, "").lower() in {"1", "t", "true"}


def _dry_run(value: str | None) -> bool:
    if value in {None, ""}:
        return False
    if value != "All":
        raise bad_request(f"dryRun {value!r} is unknown: expected All")
    return True


def is_watch(query: Mapping[str, str]) -> bool:
    return is_set(query, "watch")
