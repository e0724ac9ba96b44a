"""ValidatingWebhookConfigurations: their defaults and refusals, and which requests their rules cover.

k8s.io/kubernetes/pkg/apis/admissionregistration/{v1/defaults.go,validation/validation.go}. `matchConditions` are
refused, because the emulation does not evaluate them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from llmservice_local.api.errors import FieldError
from llmservice_local.api.kinds import Kind
from llmservice_local.api.schema import with_defaults

Object = dict[str, Any]

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


def rule_matches(rule: Mapping[str, Any], kind: Kind, subresource: str, operation: str) -> bool:
    """Whether a rule covers an operation; a resource without a slash never covers a subresource."""
    if rule["scope"] not in {"*", "Namespaced" if kind.namespaced else "Cluster"}:
        return False
    fields = (("operations", operation), ("apiGroups", kind.group), ("apiVersions", kind.version))
    if not all({"*", value} & set(rule[field]) for field, value in fields):
        return False
    resources = (resource.partition("/") for resource in rule["resources"])
    return any(name in {"*", kind.plural} and sub in {"*", subresource} for name, _, sub in resources)


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
