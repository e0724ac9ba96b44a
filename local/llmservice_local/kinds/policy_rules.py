"""Defaults and validation of NetworkPolicies, PodDisruptionBudgets and ValidatingWebhookConfigurations.

They follow k8s.io/kubernetes/pkg/apis/{networking,policy,admissionregistration}/. `matchConditions` of webhooks are
refused, because the emulated API does not evaluate them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmservice_local.errors import FieldError
from llmservice_local.kinds.schema import with_defaults
from llmservice_local.objects import Object

_PERCENT = re.compile(r"[0-9]+%")
_EVICTION_POLICIES = ("IfHealthyBudget", "AlwaysAllow")


def default_network_policy(obj: Object) -> Object:
    """The default of policyTypes is Ingress, and Egress if the policy has egress rules."""
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
        yield from check_bound(spec.get(name), f"spec.{name}")
    if (policy := spec.get("unhealthyPodEvictionPolicy")) is not None:
        yield from _check_supported(policy, _EVICTION_POLICIES, "spec.unhealthyPodEvictionPolicy")


def check_bound(value: int | str | None, path: str, most: int | None = 100) -> Iterator[FieldError]:
    """Check a number of pods or a percentage of them, of at most `most`."""
    why = ""
    if isinstance(value, int) and value < 0:
        why = f"{value}: must be greater than or equal to 0"
    elif isinstance(value, str) and not _PERCENT.fullmatch(value):
        why = f"\"{value}\": a valid percent string must be a numeric string followed by an ending '%'"
    elif isinstance(value, str) and most is not None and int(value[:-1]) > most:
        why = f'"{value}": must not be greater than {most}%'
    if why:
        yield FieldError(path, "FieldValueInvalid", f"Invalid value: {why}")


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


_WEBHOOK_DEFAULTS: Object = {
    "failurePolicy": {"default": "Fail"},
    "matchPolicy": {"default": "Equivalent"},
    "namespaceSelector": {"default": {}},
    "objectSelector": {"default": {}},
    "timeoutSeconds": {"default": 10},
    "rules": {"items": {"properties": {"scope": {"default": "*"}}}},
    "clientConfig": {"properties": {"service": {"properties": {"port": {"default": 443}}}}},
}
_DEFAULTS: Object = {"properties": {"webhooks": {"items": {"properties": _WEBHOOK_DEFAULTS}}}}
_QUALIFIED_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?){2,}$")
_SUPPORTED = {
    "failurePolicy": ("Fail", "Ignore"),
    "matchPolicy": ("Equivalent", "Exact"),
    "sideEffects": ("None", "NoneOnDryRun"),
}
_OPERATIONS = ("*", "CONNECT", "CREATE", "DELETE", "UPDATE")
_SCOPES = ("*", "Cluster", "Namespaced")


def default_webhooks(obj: Object) -> Object:
    defaulted: Object = with_defaults(obj, _DEFAULTS)
    return defaulted


def check_webhooks(obj: Object, old: Object | None) -> Iterator[FieldError]:
    del old
    names: set[str] = set()
    for index, hook in enumerate(obj.get("webhooks") or []):
        at, name = f"webhooks[{index}]", hook["name"]
        if name in names:
            yield FieldError(f"{at}.name", "FieldValueDuplicate", f'Duplicate value: "{name}"')
        names.add(name)
        yield from _check_webhook(hook, at)


def _check_webhook(hook: Object, at: str) -> Iterator[FieldError]:
    if not _QUALIFIED_NAME.match(hook["name"]):
        why = f'Invalid value: "{hook["name"]}": should be a domain with at least three segments separated by dots'
        yield FieldError(f"{at}.name", "FieldValueInvalid", why)
    if not {"v1", "v1beta1"} & set(hook["admissionReviewVersions"]):
        why = "Required value: must specify one of v1, v1beta1"
        yield FieldError(f"{at}.admissionReviewVersions", "FieldValueRequired", why)
    for field, supported in _SUPPORTED.items():
        yield from _check_supported(hook[field], supported, f"{at}.{field}")
    if not 1 <= hook["timeoutSeconds"] <= 30:
        why = f"Invalid value: {hook['timeoutSeconds']}: the timeout value must be between 1 and 30 seconds"
        yield FieldError(f"{at}.timeoutSeconds", "FieldValueInvalid", why)
    if hook.get("matchConditions"):
        why = "Forbidden: the emulated API does not evaluate matchConditions: use selectors and rules"
        yield FieldError(f"{at}.matchConditions", "FieldValueForbidden", why)
    config = hook["clientConfig"]
    if bool(config.get("url")) == bool(config.get("service")):
        yield FieldError(f"{at}.clientConfig", "FieldValueRequired", "Required value: exactly one of url or service")
    elif config.get("url") and not config["url"].startswith("https://"):
        why = f"Invalid value: \"{config['url']}\": 'https' is the only allowed URL scheme"
        yield FieldError(f"{at}.clientConfig.url", "FieldValueInvalid", why)
    for index, rule in enumerate(hook.get("rules") or []):
        yield from _check_rule(rule, f"{at}.rules[{index}]")


def _check_rule(rule: Object, at: str) -> Iterator[FieldError]:
    for field in ("operations", "apiGroups", "apiVersions", "resources"):
        if not rule.get(field):
            yield FieldError(f"{at}.{field}", "FieldValueRequired", "Required value")
    for index, operation in enumerate(rule.get("operations") or []):
        yield from _check_supported(operation, _OPERATIONS, f"{at}.operations[{index}]")
    yield from _check_supported(rule["scope"], _SCOPES, f"{at}.scope")


def _check_supported(value: str, supported: tuple[str, ...], path: str) -> Iterator[FieldError]:
    if value not in supported:
        listed = ", ".join(f'"{one}"' for one in supported)
        yield FieldError(path, "FieldValueNotSupported", f'Unsupported value: "{value}": supported values: {listed}')
