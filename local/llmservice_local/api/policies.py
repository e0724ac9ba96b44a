"""ValidatingAdmissionPolicies: CEL expressions that a write must satisfy before it is stored.

https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/
Differences from a real API server: parameters, selectors, audit annotations and message expressions are not evaluated,
and of a binding's actions only Deny does something.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError

from llmservice_local.api.cel import Evaluate, program
from llmservice_local.api.errors import ApiError
from llmservice_local.api.kinds import Kind
from llmservice_local.api.store import Store
from llmservice_local.api.webhook_rules import rule_matches

Object = dict[str, Any]

_GROUP = "admissionregistration.k8s.io"


def matching_policies(store: Store, kind: Kind, subresource: str, operation: str) -> list[tuple[str, Object]]:
    """The policies that a binding puts in force for such a request, each with its binding's name."""
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
