"""NetworkPolicies and PodDisruptionBudgets: the defaults and refusals of the real API server.

k8s.io/kubernetes/pkg/apis/{networking,policy}/validation/validation.go.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llmservice_local.api.errors import FieldError

Object = dict[str, Any]

_PERCENT = re.compile(r"^(100|[0-9]{1,2})%$")
_EVICTION_POLICIES = ("IfHealthyBudget", "AlwaysAllow")


def default_network_policy(obj: Object) -> Object:
    """Without policyTypes a policy is about ingress, and about egress where it has rules for that."""
    spec = dict(obj.get("spec") or {})
    if not spec.get("policyTypes"):
        spec["policyTypes"] = ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]
    for direction in ("ingress", "egress"):
        if direction in spec:
            spec[direction] = [_with_protocols(rule) for rule in spec[direction] or []]
    return {**obj, "spec": spec}


def check_network_policy(obj: Object, old: Object | None) -> Iterator[FieldError]:
    del old
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(obj["spec"].get(direction) or []):
            for number, peer in enumerate(rule.get(side) or []):
                yield from _check_peer(peer, f"spec.{direction}[{index}].{side}[{number}]")


def check_disruption_budget(obj: Object, old: Object | None) -> Iterator[FieldError]:
    del old
    spec = obj.get("spec") or {}
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        why = "Invalid value: minAvailable and maxUnavailable cannot be both set"
        yield FieldError("spec", "FieldValueInvalid", why)
    for name in ("minAvailable", "maxUnavailable"):
        value = spec.get(name)
        if isinstance(value, int) and value < 0:
            why = f"Invalid value: {value}: must be greater than or equal to 0"
            yield FieldError(f"spec.{name}", "FieldValueInvalid", why)
        if isinstance(value, str) and not _PERCENT.match(value):
            why = (
                f"Invalid value: \"{value}\": a valid percent string must be a numeric string followed by an ending '%'"
            )
            yield FieldError(f"spec.{name}", "FieldValueInvalid", why)
    policy = spec.get("unhealthyPodEvictionPolicy")
    if policy is not None and policy not in _EVICTION_POLICIES:
        supported = ", ".join(f'"{one}"' for one in _EVICTION_POLICIES)
        why = f'Unsupported value: "{policy}": supported values: {supported}'
        yield FieldError("spec.unhealthyPodEvictionPolicy", "FieldValueNotSupported", why)


def _with_protocols(rule: Object) -> Object:
    if not rule.get("ports"):
        return rule
    return {**rule, "ports": [{**port, "protocol": port.get("protocol") or "TCP"} for port in rule["ports"]]}


def _check_peer(peer: Object, path: str) -> Iterator[FieldError]:
    selects = {name for name in ("podSelector", "namespaceSelector") if peer.get(name) is not None}
    if peer.get("ipBlock") is not None and selects:
        yield FieldError(path, "FieldValueForbidden", "Forbidden: may not specify both ipBlock and another peer")
    elif peer.get("ipBlock") is None and not selects:
        yield FieldError(path, "FieldValueRequired", "Required value: must specify a peer")
