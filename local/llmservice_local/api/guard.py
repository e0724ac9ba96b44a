"""The door of the emulated API: tokens in, accounts and refusals out, and a line of audit for each request."""

from __future__ import annotations

from aiohttp import web

from llmservice_local.api.access import Account, Object, Tokens, authorize, verb
from llmservice_local.api.audit import AuditLog
from llmservice_local.api.errors import ApiError
from llmservice_local.api.registry import APPLY_PATCH, Registry
from llmservice_local.api.request import Target, is_watch


class Guard:
    """Holds service accounts to their roles; who brings no token is the administrator, and passes."""

    def __init__(self, registry: Registry, audit: AuditLog | None) -> None:
        self._registry = registry
        self._audit = audit
        self._tokens = Tokens()

    def account(self, request: web.Request) -> Account | None:
        """Who asks; None for the administrator. Raises `ApiError` 401."""
        return self._tokens.bearer(request.headers.get("Authorization"))

    def admit(self, account: Account, request: web.Request, target: Target) -> None:
        """Raises `ApiError` 403. An apply that creates its object needs the right to create as well."""
        asked = verb(request.method, target, is_watch=is_watch(request.query))
        verbs = [asked]
        if asked == "patch" and request.content_type == APPLY_PATCH and not self._is_there(target):
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
                self._audit.note(account, asked, request.path_qs, refusal)

    def token_request(self, target: Target) -> Object:
        """A token of a service account, which must be there; it lasts as long as the server."""
        namespace = target.namespace or ""
        self._registry.get(target.kind, namespace, target.name)
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": target.name, "namespace": namespace},
            "status": {"token": self._tokens.issue(Account(namespace, target.name)), "expirationTimestamp": None},
        }

    def _is_there(self, target: Target) -> bool:
        try:
            self._registry.get(target.kind, target.namespace or "", target.name)
        except ApiError:
            return False
        return True
