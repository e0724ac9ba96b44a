"""Authentication by service account tokens, authorization by RBAC, and an audit log, as in kube-apiserver.

A request without a token has all rights; a request with a token has those of the roles bound to its account.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from llmservice_local.api.registry import APPLY_PATCH, Registry
from llmservice_local.api.request import Target, is_watch
from llmservice_local.errors import ApiError, bad_request
from llmservice_local.kinds.catalogue import Kind
from llmservice_local.objects import Object

_RBAC = ("rbac.authorization.k8s.io", "v1")
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
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
    """The sender of a request as a UserInfo of authentication.k8s.io; None is the administrator."""
    if account is None:
        return {"username": "admin", "groups": ["system:masters", "system:authenticated"]}
    return {"username": account.user, "groups": sorted(account.groups)}


@dataclass(slots=True)
class Tokens:
    """The issued tokens; they do not expire while the server runs."""

    _accounts: dict[str, Account] = field(default_factory=dict)

    def issue(self, account: Account) -> str:
        token = secrets.token_urlsafe(32)
        self._accounts[token] = account
        return token

    def bearer(self, authorization: str | None) -> Account | None:
        """The account of an Authorization header; None (the administrator) without one. Raises `ApiError` 401."""
        if authorization is None:
            return None
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or token not in self._accounts:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return self._accounts[token]


def verb(method: str, target: Target, *, is_watch: bool) -> str:
    """The RBAC verb of a request."""
    if method in {"GET", "HEAD"}:
        return "watch" if is_watch else "get" if target.name else "list"
    if method == "DELETE" and not target.name:
        return "deletecollection"
    return _VERBS.get(method, method.lower())


def allows(registry: Registry, account: Account, verb: str, target: Target) -> bool:
    """Whether a role of the account has a rule for the request."""
    return any(_covers(rule, verb, target) for rule in _rules(registry, account, target.namespace))


def authorize(registry: Registry, account: Account, verb: str, target: Target) -> None:
    """Raises `ApiError` 403 unless a role of the account has a rule for the request."""
    if not allows(registry, account, verb, target):
        raise _forbidden(account, verb, target)


def _rules(registry: Registry, account: Account, namespace: str | None) -> Iterator[Object]:
    """The rules of the account's cluster roles, then those of its roles in the namespace."""
    places: list[tuple[str, str | None]] = [("clusterrolebindings", None)]
    if namespace is not None:
        places.append(("rolebindings", namespace))
    for plural, place in places:
        for binding in registry.select(registry.kinds.find(*_RBAC, plural), place):
            if any(map(account.is_subject, binding.get("subjects") or [])):
                yield from _role(registry, binding["roleRef"], place).get("rules") or []


def _role(registry: Registry, reference: Mapping[str, Any], namespace: str | None) -> Object:
    """The role that a binding names; a missing role grants nothing."""
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


class AuditLog:
    """Appends one line, in the format of kube-apiserver's audit log, per authorized or refused request.

    It contains no bodies and no tokens.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def record(self, account: Account, verb: str, uri: str, refusal: ApiError | None) -> None:
        event = {
            "kind": "Event",
            "apiVersion": "audit.k8s.io/v1",
            "level": "Metadata",
            "verb": verb,
            "user": {"username": account.user},
            "requestURI": uri,
            "responseStatus": {} if refusal is None else {"code": refusal.code, "message": str(refusal)},
        }
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Guard:
    """Authenticates, authorizes and audits the requests of service accounts."""

    def __init__(self, registry: Registry, audit: AuditLog | None) -> None:
        self._registry = registry
        self._audit = audit
        self._tokens = Tokens()

    def account(self, request: web.Request) -> Account | None:
        """The account that sends the request, or that the administrator acts as; None for the administrator.

        Raises `ApiError` 401 or 403.
        """
        sender = self._tokens.bearer(request.headers.get("Authorization"))
        user = request.headers.get("Impersonate-User")
        if not user:
            return sender
        if sender is not None:
            cannot = f'User "{sender.user}" cannot impersonate resource "users" in API group "" at the cluster scope'
            raise ApiError(403, "Forbidden", f'users "{user}" is forbidden: {cannot}')
        match user.split(":"):
            case ["system", "serviceaccount", namespace, name]:
                return Account(namespace, name)
        expected = "the emulated API can only impersonate system:serviceaccount:NAMESPACE:NAME"
        raise ApiError(403, "Forbidden", f'users "{user}" is forbidden: {expected}')

    def admit(self, account: Account, request: web.Request, target: Target) -> None:
        """Raises `ApiError` 403. An apply of an object that does not exist needs the verb `create` as well."""
        requested = verb(request.method, target, is_watch=is_watch(request.query))
        verbs = [requested]
        if requested == "patch" and request.content_type == APPLY_PATCH and not self._exists(target):
            verbs.append("create")
        refusal: ApiError | None = None
        try:
            for one in verbs:
                authorize(self._registry, account, one, target)
        except ApiError as error:
            refusal = error
            raise
        finally:
            if self._audit is not None:
                self._audit.record(account, requested, request.path_qs, refusal)

    def access_review(self, account: Account | None, review: Any) -> Object:
        """Answer a SelfSubjectAccessReview, which `kubectl auth can-i` sends; raises `ApiError` 400."""
        if not isinstance(review, dict):
            raise bad_request(f"a SelfSubjectAccessReview is an object, not {type(review).__name__}")
        spec = review.get("spec") or {}
        wanted = spec.get("resourceAttributes") or {}
        kind = Kind(wanted.get("group", ""), "", "", wanted.get("resource", ""))
        target = Target(kind, wanted.get("namespace"), wanted.get("name", ""), wanted.get("subresource", ""))
        allowed = account is None or allows(self._registry, account, wanted.get("verb", ""), target)
        own = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "metadata": {}}
        return {**own, "spec": spec, "status": {"allowed": allowed}}

    def token_request(self, target: Target) -> Object:
        """Issue a token for an existing service account; raises `ApiError` 404."""
        namespace = target.namespace or ""
        self._registry.get(target.kind, namespace, target.name)
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": target.name, "namespace": namespace},
            "status": {"token": self._tokens.issue(Account(namespace, target.name)), "expirationTimestamp": None},
        }

    def _exists(self, target: Target) -> bool:
        try:
            self._registry.get(target.kind, target.namespace or "", target.name)
        except ApiError:
            return False
        return True
