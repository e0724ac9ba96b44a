"""Validating admission webhooks: a write that a rule matches is reviewed before it is stored.

The verbs of the registry are synchronous and a review is not. A matching write therefore runs as a dry run first; the
webhooks review its result, which is then stored. If the object has changed during the review, everything is repeated.
The wire format is AdmissionReview v1:
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/

Policies (policies.py) are checked before webhooks are called.

Differences from a real API server: webhooks are called one after the other and the first denial ends the request;
`matchPolicy` is always Exact; `clientConfig.service` is unreachable, because the emulated cluster has no service
network, so that the failure policy decides; creations of `pods/binding`, `pods/eviction` and `serviceaccounts/token`
are not reviewed.
"""

from __future__ import annotations

import base64
import json
import ssl
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from llmservice_local.api.access import Account, user_info
from llmservice_local.api.policies import check_policies, matching_policies, rule_matches
from llmservice_local.api.registry import DeleteOptions, Registry, WriteOptions, Written
from llmservice_local.api.request import Target
from llmservice_local.errors import ApiError, bad_request, denied
from llmservice_local.kinds.catalogue import scale_of
from llmservice_local.kinds.schema import ANY, pruned, validate
from llmservice_local.objects import Object
from llmservice_local.selector import matches_labels

_GROUP = "admissionregistration.k8s.io"
_REVIEW = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}
_STRING = {"type": "string"}
_OBJECT = {"type": "object", **ANY}
_STATUS = {"code": {"type": "integer"}, "message": _STRING, "reason": _STRING, "details": _OBJECT}
_RESPONSE = {
    "type": "object",
    "properties": {
        "uid": _STRING,
        "allowed": {"type": "boolean"},
        "status": {"type": "object", "properties": _STATUS},
        "warnings": {"type": "array", "items": _STRING},
    },
}


class WebhookError(Exception):
    """A webhook cannot be reached, or its response is not a valid review of the request."""


class Webhooks:
    """Calls the verbs of a registry after the reviews that its ValidatingWebhookConfigurations require."""

    def __init__(self, registry: Registry, session: ClientSession) -> None:
        self._registry = registry
        self._session = session

    async def write(
        self, target: Target, account: Account | None, options: WriteOptions, verb: Callable[[WriteOptions], Written]
    ) -> Written:
        """Create, update or patch by calling `verb`; raises `ApiError` if a webhook denies the request or fails."""
        while True:
            operation = "CREATE" if self._stored(target) is None else "UPDATE"
            hooks = self._matching(target, operation)
            policies = matching_policies(self._registry.store, target.kind, target.subresource, operation)
            if not hooks and not policies:
                return verb(options)
            dry = verb(replace(options, dry_run=True))
            request = self._request(target, account, operation, dry.new, dry.old, options)
            check_policies(policies, request)
            dry = replace(dry, warnings=await self._review(hooks, request, dry.warnings))
            written = dry if options.dry_run else self._registry.commit(target.kind, dry)
            if written is not None:
                return written

    async def delete(
        self, target: Target, account: Account | None, options: DeleteOptions
    ) -> tuple[Object, bool, list[str]]:
        """Delete an object; returns it, whether it is gone, and warnings. Raises `ApiError` as `write` does."""
        kind, namespace, name = target.kind, target.namespace or "", target.name
        while True:
            warnings: list[str] = []
            if hooks := self._matching(target, "DELETE"):
                old = self._registry.delete(kind, namespace, name, replace(options, dry_run=True))[0]
                request = self._request(target, account, "DELETE", None, old, options)
                warnings = await self._review(hooks, request, [])
                if self._stored(target) is not old:
                    continue
            return *self._registry.delete(kind, namespace, name, options), warnings

    def _stored(self, target: Target) -> Object | None:
        return self._registry.store.get(target.kind.collection, target.namespace or "", target.name)

    def _matching(self, target: Target, operation: str) -> list[Object]:
        """The webhooks with a matching rule, sorted by name. Webhook configurations themselves are never reviewed."""
        if target.kind.group == _GROUP:
            return []
        hooks = [
            hook
            for configuration in self._registry.store.list((_GROUP, "validatingwebhookconfigurations"))
            for hook in configuration.get("webhooks") or []
            if any(rule_matches(rule, target.kind, target.subresource, operation) for rule in hook.get("rules") or [])
        ]
        return sorted(hooks, key=lambda hook: str(hook["name"]))

    def _request(
        self,
        target: Target,
        account: Account | None,
        operation: str,
        new: Object | None,
        old: Object | None,
        options: WriteOptions | DeleteOptions,
    ) -> Object:
        """An AdmissionRequest without its uid."""
        kind, metadata = target.kind, (new or old or {})["metadata"]
        shown = {"group": kind.group, "version": kind.version, "kind": kind.name}
        resource = {"group": kind.group, "version": kind.version, "resource": kind.plural}
        new, old = (self._registry.present(kind, obj) if obj is not None else None for obj in (new, old))
        if target.subresource == "scale":
            shown = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            new, old = (scale_of(kind, obj) if obj is not None else None for obj in (new, old))
        request: Object = {
            "kind": shown,
            "resource": resource,
            "requestKind": shown,
            "requestResource": resource,
            "operation": operation,
            "userInfo": user_info(account),
            "object": new,
            "oldObject": old,
            "dryRun": options.dry_run,
            "options": _options(operation, options),
        }
        if target.subresource:
            request |= {"subResource": target.subresource, "requestSubResource": target.subresource}
        if name := target.name or ("" if metadata.get("generateName") else metadata["name"]):
            request["name"] = name
        if namespace := name if kind.collection == ("", "namespaces") else target.namespace:
            request["namespace"] = namespace
        return request

    async def _review(self, hooks: list[Object], request: Object, warnings: list[str]) -> list[str]:
        """Call the webhooks whose selectors match, in order; returns `warnings` and those of the webhooks."""
        warnings = list(warnings)
        for hook in hooks:
            name = hook["name"]
            if not self._selects(hook, request):
                continue
            if request["dryRun"] and hook["sideEffects"] not in {"None", "NoneOnDryRun"}:
                raise bad_request(f'admission webhook "{name}" does not support dry run')
            try:
                response = await self._call(hook, request)
            except WebhookError as error:
                if hook["failurePolicy"] == "Ignore":
                    continue
                why = f'failed calling webhook "{name}": {error}'
                details = {"causes": [{"message": why}]}
                raise ApiError(500, "InternalError", f"Internal error occurred: {why}", details, warnings) from error
            warnings += response.get("warnings") or []
            if not response.get("allowed"):
                raise denied(name, response.get("status") or {}, warnings)
        return warnings

    def _selects(self, hook: Object, request: Object) -> bool:
        new, old = request["object"], request["oldObject"]
        if not any(matches_labels(hook["objectSelector"], _labels(obj)) for obj in (new, old) if obj is not None):
            return False
        if "namespace" not in request:
            return True
        namespace = self._registry.store.get(("", "namespaces"), "", request["namespace"])
        if request["kind"] == {"group": "", "version": "v1", "kind": "Namespace"} and new is not None:
            namespace = new
        return matches_labels(hook["namespaceSelector"], _labels(namespace) if namespace is not None else {})

    async def _call(self, hook: Object, request: Object) -> Object:
        """The `response` of a webhook's review; raises `WebhookError` if there is no valid one."""
        if "v1" not in hook["admissionReviewVersions"]:
            raise WebhookError("could not create admission objects: webhook does not accept AdmissionReview v1")
        config, timeout_s, uid = hook["clientConfig"], hook["timeoutSeconds"], str(uuid.uuid4())
        if not config.get("url"):
            raise WebhookError("failed to call webhook: the emulated cluster has no service network: use a url")
        try:
            async with self._session.post(
                config["url"],
                params={"timeout": f"{timeout_s}s"},
                json={**_REVIEW, "request": {"uid": uid, **request}},
                ssl=_tls(config.get("caBundle") or ""),
                timeout=ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as answer:
                if not 200 <= answer.status < 300:
                    raise WebhookError(f"failed to call webhook: the server responded with status {answer.status}")
                review = json.loads(await answer.read())
        except (ClientError, OSError, ValueError) as error:
            why = "context deadline exceeded" if isinstance(error, TimeoutError) else error
            raise WebhookError(f'failed to call webhook: Post "{config["url"]}": {why}') from error
        return _response(review, uid)


def _options(operation: str, options: WriteOptions | DeleteOptions) -> Object:
    sent: Object = {"kind": f"{operation.capitalize()}Options", "apiVersion": "meta.k8s.io/v1"}
    if options.dry_run:
        sent["dryRun"] = ["All"]
    if isinstance(options, WriteOptions):
        return {**sent, "fieldManager": options.manager, "fieldValidation": options.field_validation}
    if options.grace_period_s is not None:
        sent["gracePeriodSeconds"] = options.grace_period_s
    return {**sent, "propagationPolicy": options.propagation}


def _response(review: Any, uid: str) -> Object:
    if not isinstance(review, dict) or any(review.get(name) != value for name, value in _REVIEW.items()):
        raise WebhookError("received invalid webhook response: expected an AdmissionReview of admission.k8s.io/v1")
    response, _unknown = pruned(review.get("response"), _RESPONSE)
    if wrong := next(validate(response, _RESPONSE, "response"), None):
        raise WebhookError(f"received invalid webhook response: {wrong}")
    if response.get("uid") != uid:
        why = f'expected response.uid="{uid}", got "{response.get("uid", "")}"'
        raise WebhookError(f"received invalid webhook response: {why}")
    checked: Object = response
    return checked


def _labels(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


@lru_cache(maxsize=16)
def _tls(ca_bundle: str) -> ssl.SSLContext:
    """A context that trusts a base64 PEM bundle, else the system's roots; cached, so that connections are reused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False  # a real API server takes names from subjectAltName only
    if ca_bundle:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in Go, any certificate of the bundle is an anchor
        context.load_verify_locations(cadata=base64.b64decode(ca_bundle).decode())
    else:
        context.load_default_certs()
    return context
