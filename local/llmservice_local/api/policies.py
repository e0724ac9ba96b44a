"""ValidatingAdmissionPolicies: CEL expressions that a write must satisfy before it is stored.

https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/
Differences from a real API server: parameters, selectors, audit annotations and message expressions are not evaluated,
and Deny is the only supported validation action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError

from llmservice_local.api.store import Store
from llmservice_local.errors import ApiError
from llmservice_local.kinds.catalogue import Kind
from llmservice_local.kinds.cel import Evaluate, program
from llmservice_local.objects import Object

_GROUP = "admissionregistration.k8s.io"


def matching_policies(store: Store, kind: Kind, subresource: str, operation: str) -> list[tuple[str, Object]]:
    """The bound policies that match a request, each with the name of its binding."""
    if kind.group == _GROUP:
        return []
    found = []
    for binding in store.list((_GROUP, "validatingadmissionpolicybindings")):
        policy = store.get((_GROUP, "validatingadmissionpolicies"), "", binding["spec"]["policyName"])
        if policy is None or "Deny" not in (binding["spec"].get("validationActions") or []):
            continue
        rules = (policy["spec"].get("matchConstraints") or {}).get("resourceRules") or []
        if any(rule_matches({"scope": "*", **rule}, kind, subresource, operation) for rule in rules):
            found.append((binding["metadata"]["name"], policy))
    return found


def check_policies(policies: list[tuple[str, Object]], request: Object) -> None:
    """Raise `ApiError` 422 with the message of the first validation that an AdmissionRequest fails."""
    for binding, policy in policies:
        name = policy["metadata"]["name"]
        for why in _violations(policy["spec"], request):
            denial = f"ValidatingAdmissionPolicy '{name}' with binding '{binding}' denied request: {why}"
            subject = f'{request["resource"]["resource"]} "{request.get("name", "")}" is forbidden'
            raise ApiError(422, "Invalid", f"{subject}: {denial}")


def _violations(spec: Object, request: Object) -> Iterator[str]:
    known: dict[str, Any] = {
        "object": json_to_cel(request["object"]),
        "oldObject": json_to_cel(request["oldObject"]),
        "request": json_to_cel({key: request[key] for key in ("userInfo", "operation", "dryRun")}),
        "variables": celtypes.MapType(),
    }
    try:
        if not all(_compiled(one["expression"])(known) for one in spec.get("matchConditions") or []):
            return
        for one in spec.get("variables") or []:
            known["variables"][celtypes.StringType(one["name"])] = _compiled(one["expression"])(known)
        for one in spec.get("validations") or []:
            if not _compiled(one["expression"])(known):
                yield one.get("message") or f"failed expression: {one['expression'].strip()}"
    except CELEvalError as error:
        if spec.get("failurePolicy", "Fail") == "Fail":
            yield f"expression resulted in error: {error.args[0] if error.args else error}"


@lru_cache(maxsize=64)
def _compiled(expression: str) -> Evaluate:
    return program(expression, "")


def rule_matches(rule: Mapping[str, Any], kind: Kind, subresource: str, operation: str) -> bool:
    """Whether a rule of a policy or webhook matches; a resource without a slash does not match subresources."""
    if rule["scope"] not in {"*", "Namespaced" if kind.namespaced else "Cluster"}:
        return False
    fields = (("operations", operation), ("apiGroups", kind.group), ("apiVersions", kind.version))
    if not all({"*", value} & set(rule[field]) for field, value in fields):
        return False
    resources = (resource.partition("/") for resource in rule["resources"])
    return any(name in {"*", kind.plural} and sub in {"*", subresource} for name, _, sub in resources)
