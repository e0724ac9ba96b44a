"""Who asks, and whether roles let them: service account tokens and RBAC, as the real API server judges them.

A request without a token is the administrator's, as everything on this machine is; one with a token is held to the
roles that are bound to its account.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmservice_local.api.errors import ApiError
from llmservice_local.api.registry import Registry
from llmservice_local.api.request import Target

Object = dict[str, Any]

_RBAC = ("rbac.authorization.k8s.io", "v1")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Account:
    """A service account."""

    namespace: str
    name: str

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({f"system:serviceaccounts:{self.namespace}", "system:serviceaccounts", "system:authenticated"})

    def is_subject(self, subject: Mapping[str, Any]) -> bool:
        match subject["kind"]:
            case "ServiceAccount":
                return (subject.get("namespace"), subject["name"]) == (self.namespace, self.name)
            case "Group":
                return subject["name"] in self.groups
        return bool(subject["name"] == self.user)


def user_info(account: Account | None) -> Object:
    """Who asks, as a UserInfo of authentication.k8s.io."""
    if account is None:
        return {"username": "admin", "groups": ["system:masters", "system:authenticated"]}
    return {"username": account.user, "groups": sorted(account.groups)}


@dataclass(slots=True)
class Tokens:
    """The tokens that were given out; they last as long as the server."""

    _accounts: dict[str, Account] = field(default_factory=dict)

    def issue(self, account: Account) -> str:
        token = secrets.token_urlsafe(32)
        self._accounts[token] = account
        return token

    def bearer(self, authorization: str | None) -> Account | None:
        """Whose token the header carries; None for the administrator. Raises `ApiError` 401 for an unknown one."""
        if authorization is None:
            return None
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or token not in self._accounts:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return self._accounts[token]


def verb(method: str, target: Target, *, is_watch: bool) -> str:
    """What RBAC calls a request."""
    if method in {"GET", "HEAD"}:
        return "watch" if is_watch else "get" if target.name else "list"
    if method == "DELETE" and not target.name:
        return "deletecollection"
    return _VERBS.get(method, method.lower())


def authorize(registry: Registry, account: Account, verb: str, target: Target) -> None:
    """Raises `ApiError` 403 where no role of the account's has a rule for it."""
    if not any(_covers(rule, verb, target) for rule in _rules(registry, account, target.namespace)):
        raise _forbidden(account, verb, target)


def _rules(registry: Registry, account: Account, namespace: str | None) -> Iterator[Object]:
    """Those that hold everywhere, then those of the namespace."""
    places: list[tuple[str, str | None]] = [("clusterrolebindings", None)]
    if namespace is not None:
        places.append(("rolebindings", namespace))
    for plural, place in places:
        for binding in registry.select(registry.kinds.find(*_RBAC, plural), place):
            if any(map(account.is_subject, binding.get("subjects") or [])):
                yield from _role(registry, binding["roleRef"], place).get("rules") or []


def _role(registry: Registry, reference: Mapping[str, Any], namespace: str | None) -> Object:
    """The role that a binding names; one that is not there grants nothing."""
    cluster = reference["kind"] == "ClusterRole"
    kind = registry.kinds.find(*_RBAC, "clusterroles" if cluster else "roles")
    try:
        return registry.get(kind, "" if cluster else namespace or "", reference["name"])
    except ApiError:
        return {}


def _covers(rule: Mapping[str, Any], verb: str, target: Target) -> bool:
    resources = {_resource(target), f"*/{target.subresource}"}
    wanted = (({verb}, "verbs"), ({target.kind.group}, "apiGroups"), (resources, "resources"))
    names = rule.get("resourceNames") or [target.name]
    return target.name in names and all((some | {"*"}) & set(rule.get(key) or []) for some, key in wanted)


def _resource(target: Target) -> str:
    return f"{target.kind.plural}/{target.subresource}" if target.subresource else target.kind.plural


def _forbidden(account: Account, verb: str, target: Target) -> ApiError:
    kind = target.kind
    qualified = f"{kind.plural}.{kind.group}" if kind.group else kind.plural
    subject = f'{qualified} "{target.name}"' if target.name else qualified
    where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    message = (
        f'{subject} is forbidden: User "{account.user}" cannot {verb} resource "{_resource(target)}" '
        f'in API group "{kind.group}" {where}'
    )
    return ApiError(403, "Forbidden", message, {"name": target.name, "group": kind.group, "kind": kind.plural})
