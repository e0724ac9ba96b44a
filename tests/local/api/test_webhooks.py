"""Validating webhooks over real sockets: a webhook server with TLS, the emulated API, and its clients."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from llmservice_local.api.serve import Api, serve_api

pytestmark = pytest.mark.slow

Object = dict[str, Any]

HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
MAPS = "/api/v1/namespaces/default/configmaps"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
APPLY = {"Content-Type": "application/apply-patch+yaml"}
MERGE = {"Content-Type": "application/merge-patch+json"}
NAME = "check.llmservice.io"
KUBECTL = shutil.which("kubectl")


@dataclass(frozen=True, slots=True)
class Certificate:
    pem: Path
    key: Path

    @property
    def bundle(self) -> str:
        return base64.b64encode(self.pem.read_bytes()).decode()

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.pem, self.key)
        return context


def certificate(folder: Path, name: str, address: str = "127.0.0.1") -> Certificate:
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", f"subjectAltName=IP:{address}", "-keyout", made.key, "-out", made.pem],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("certificates"), "own")


@dataclass
class Webhook:
    """A webhook server that records the requests of its reviews, and answers as `respond` says."""

    url: str = ""
    reviewed: list[Object] = field(default_factory=list)
    respond: Callable[[Object], Any] = lambda _request: {"allowed": True}

    async def handle(self, request: web.Request) -> web.Response:
        review = await request.json()
        assert (review["kind"], review["apiVersion"]) == ("AdmissionReview", "admission.k8s.io/v1")
        asked = review["request"]
        self.reviewed.append({**asked, "timeout": request.query["timeout"]})
        answer = self.respond(asked)
        if isinstance(answer, web.Response):
            return answer
        if asyncio.isfuture(answer):
            await answer
        return web.json_response({**review, "response": {"uid": asked["uid"], **answer}})

    def denies(self, **status: Any) -> None:
        self.respond = lambda _request: {"allowed": False, "status": status}


@pytest.fixture
async def webhook(own: Certificate) -> AsyncIterator[Webhook]:
    async with AsyncExitStack() as stack:
        yield await served(stack, own)


async def served(stack: AsyncExitStack, certificate: Certificate) -> Webhook:
    webhook = Webhook()
    application = web.Application()
    application.router.add_post("/validate", webhook.handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=certificate.context()).start()
    webhook.url = f"https://127.0.0.1:{runner.addresses[0][1]}/validate"
    return webhook


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serve_api() as served:
        yield served


@pytest.fixture
async def http(api: Api) -> AsyncIterator[ClientSession]:
    async with ClientSession(api.url) as session:
        yield session


def rule(resource: str = "configmaps", group: str = "", operations: tuple[str, ...] = ("*",)) -> Object:
    return {"apiGroups": [group], "apiVersions": ["*"], "resources": [resource], "operations": list(operations)}


def configuration(url: str, bundle: str, *rules: Object, name: str = NAME, **fields: Any) -> Object:
    hook = {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {"url": url, "caBundle": bundle},
        "rules": list(rules) or [rule()],
        **fields,
    }
    return {"metadata": {"name": name.partition(".")[0]}, "webhooks": [hook]}


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    body: Object
    warnings: list[str]


async def send(http: ClientSession, method: str, path: str, body: Any = None, **options: Any) -> Answer:
    async with http.request(method, path, json=body, **options) as response:
        warnings = [json.loads(value.removeprefix("299 - ")) for value in response.headers.getall("Warning", [])]
        return Answer(response.status, await response.json(), warnings)


async def register(http: ClientSession, configuration: Object) -> None:
    assert (await send(http, "POST", HOOKS, configuration)).code == 201


def config_map(name: str = "m", labels: Mapping[str, str] | None = None, **data: str) -> Object:
    return {"metadata": {"name": name, "labels": dict(labels or {})}, "data": data}


def deployment(replicas: int = 1) -> Object:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "x:1"}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"a": "b"}}, "template": template}
    return {"metadata": {"name": "d"}, "spec": spec}


async def stored(http: ClientSession, path: str) -> Object | None:
    answer = await send(http, "GET", path)
    return answer.body if answer.code == 200 else None


# -- the kind ----------------------------------------------------------------------------------------------------------


async def test_configuration_is_a_kind_like_any_other(http: ClientSession) -> None:
    resources = (await send(http, "GET", HOOKS.rpartition("/")[0])).body["resources"]
    assert (HOOKS.rpartition("/")[2], False) in [(resource["name"], resource["namespaced"]) for resource in resources]
    created = (await send(http, "POST", HOOKS, configuration("https://x/", ""))).body
    (hook,) = created["webhooks"]
    defaults = {"failurePolicy": "Fail", "matchPolicy": "Equivalent", "timeoutSeconds": 10, "namespaceSelector": {}}
    assert defaults.items() <= hook.items()
    assert (hook["rules"][0]["scope"], created["metadata"]["generation"]) == ("*", 1)
    body = {**configuration("https://y/", "", name="other.llmservice.io"), "metadata": {"name": "check"}}
    applied = await send(http, "PATCH", f"{HOOKS}/check", body, params={"fieldManager": "me"}, headers=APPLY)
    assert [one["name"] for one in applied.body["webhooks"]] == [NAME, "other.llmservice.io"]
    assert applied.body["metadata"]["generation"] == 2
    table = await send(http, "GET", HOOKS, headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"})
    assert table.body["rows"][0]["cells"][:2] == ["check", 2]
    assert (await send(http, "DELETE", f"{HOOKS}/check")).code == 200
    assert await stored(http, f"{HOOKS}/check") is None


# -- the review --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "reason", "message"),
    [
        ({"code": 422, "message": "no memory"}, 422, "", "the request: no memory"),
        ({"code": 403, "reason": "Quota", "message": "no"}, 403, "Quota", "the request: no"),
        ({"code": 409, "reason": "Taken"}, 409, "Taken", "the request: Taken"),
        ({"message": "no"}, 400, "", "the request: no"),
        ({"code": 200}, 400, "", "the request without explanation"),
    ],
)
async def test_denial_has_the_code_reason_and_message_of_the_webhook(
    http: ClientSession, webhook: Webhook, own: Certificate, status: Object, code: int, reason: str, message: str
) -> None:
    await register(http, configuration(webhook.url, own.bundle))
    webhook.denies(**status)
    answer = await send(http, "POST", MAPS, config_map())
    assert (answer.code, answer.body["code"], answer.body["reason"]) == (code, code, reason)
    assert answer.body["message"] == f'admission webhook "{NAME}" denied {message}'
    assert await stored(http, f"{MAPS}/m") is None


async def test_review_describes_the_request(http: ClientSession, webhook: Webhook, own: Certificate) -> None:
    await register(http, configuration(webhook.url, own.bundle, timeoutSeconds=7))
    await send(http, "POST", MAPS, config_map(a="1"), params={"fieldManager": "me"})
    (request,) = webhook.reviewed
    resource = {"group": "", "version": "v1", "resource": "configmaps"}
    kind = {"group": "", "version": "v1", "kind": "ConfigMap"}
    assert (request["resource"], request["requestResource"]) == (resource, resource)
    assert (request["kind"], request["requestKind"]) == (kind, kind)
    assert (request["operation"], request["namespace"], request["name"]) == ("CREATE", "default", "m")
    assert request["userInfo"] == {"username": "admin", "groups": ["system:masters", "system:authenticated"]}
    assert (request["object"]["data"], request["oldObject"], request["dryRun"]) == ({"a": "1"}, None, False)
    assert (request["options"]["kind"], request["options"]["fieldManager"]) == ("CreateOptions", "me")
    assert request["timeout"] == "7s"
    assert request["object"]["metadata"]["uid"] == (await stored(http, f"{MAPS}/m") or {})["metadata"]["uid"]


async def test_generated_name_is_in_the_object_only(http: ClientSession, webhook: Webhook, own: Certificate) -> None:
    await register(http, configuration(webhook.url, own.bundle))
    created = await send(http, "POST", MAPS, {"metadata": {"generateName": "m-"}})
    (request,) = webhook.reviewed
    assert "name" not in request
    assert request["object"]["metadata"]["name"] == created.body["metadata"]["name"]


async def test_review_names_the_service_account(http: ClientSession, webhook: Webhook, own: Certificate) -> None:
    await send(http, "POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "bot"}})
    token = await send(http, "POST", "/api/v1/namespaces/default/serviceaccounts/bot/token", {})
    bindings = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]}]
    await send(http, "POST", f"{bindings}/roles", {"metadata": {"name": "r"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "bot", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    body = {"metadata": {"name": "r"}, "roleRef": role, "subjects": [subject]}
    await send(http, "POST", f"{bindings}/rolebindings", body)
    await register(http, configuration(webhook.url, own.bundle))
    headers = {"Authorization": f"Bearer {token.body['status']['token']}"}
    assert (await send(http, "POST", MAPS, config_map(), headers=headers)).code == 201
    groups = ["system:authenticated", "system:serviceaccounts", "system:serviceaccounts:default"]
    assert webhook.reviewed[0]["userInfo"] == {"username": "system:serviceaccount:default:bot", "groups": groups}


async def test_every_way_to_write_is_reviewed_and_can_be_denied(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    await register(http, configuration(webhook.url, own.bundle))
    webhook.respond = lambda request: {"allowed": (request["object"] or {}).get("data", {}).get("a") != "bad"}
    good, bad = config_map(a="good"), config_map(a="bad")
    apply: Object = {"params": {"fieldManager": "me", "force": "true"}, "headers": APPLY}
    strategic = {"headers": {"Content-Type": "application/strategic-merge-patch+json"}}
    replace = [{"op": "replace", "path": "/data/a", "value": "bad"}]
    assert (await send(http, "PATCH", f"{MAPS}/m", bad, **apply)).code == 400
    assert (await send(http, "PATCH", f"{MAPS}/m", good, **apply)).code == 201
    assert (await send(http, "PATCH", f"{MAPS}/m", bad, **apply)).code == 400
    assert (await send(http, "PUT", f"{MAPS}/m", bad)).code == 400
    assert (await send(http, "PATCH", f"{MAPS}/m", {"data": {"a": "bad"}}, headers=MERGE)).code == 400
    assert (await send(http, "PATCH", f"{MAPS}/m", {"data": {"a": "bad"}}, **strategic)).code == 400
    json_patch = {"headers": {"Content-Type": "application/json-patch+json"}}
    assert (await send(http, "PATCH", f"{MAPS}/m", replace, **json_patch)).code == 400
    assert (await send(http, "PUT", f"{MAPS}/m", good)).code == 200
    assert [request["operation"] for request in webhook.reviewed] == ["CREATE"] * 2 + ["UPDATE"] * 6
    assert webhook.reviewed[-1]["oldObject"]["data"] == {"a": "good"}
    assert webhook.reviewed[-1]["options"]["kind"] == "UpdateOptions"
    assert ((await stored(http, f"{MAPS}/m")) or {})["data"] == {"a": "good"}


async def test_delete_is_reviewed_with_the_old_object(http: ClientSession, webhook: Webhook, own: Certificate) -> None:
    await register(http, configuration(webhook.url, own.bundle, rule(operations=("DELETE",))))
    for name in ("a", "b"):
        assert (await send(http, "POST", MAPS, config_map(name))).code == 201
    webhook.denies(code=403, message="in use")
    assert (await send(http, "DELETE", f"{MAPS}/a")).code == 403
    assert (await send(http, "DELETE", MAPS)).code == 403
    webhook.respond = lambda _request: {"allowed": True, "warnings": ["gone for good"]}
    assert (await send(http, "DELETE", f"{MAPS}/a")).warnings == ["gone for good"]
    assert (await send(http, "DELETE", MAPS)).warnings == ["gone for good"]
    assert await stored(http, f"{MAPS}/b") is None
    request = webhook.reviewed[0]
    assert (request["operation"], request["object"], request["name"]) == ("DELETE", None, "a")
    assert (request["oldObject"]["metadata"]["name"], request["options"]["kind"]) == ("a", "DeleteOptions")


@pytest.mark.parametrize("allowed", [True, False])
async def test_warnings_reach_the_client(
    http: ClientSession, webhook: Webhook, own: Certificate, allowed: bool
) -> None:
    await register(http, configuration(webhook.url, own.bundle))
    webhook.respond = lambda _request: {"allowed": allowed, "warnings": ['deprecated: "a" → "b"', "twice", "twice"]}
    answer = await send(http, "POST", MAPS, {**config_map(), "dada": 1})
    assert answer.code == (201 if allowed else 400)
    assert answer.warnings == ['unknown field "dada"', 'deprecated: "a" → "b"', "twice"]


async def test_dry_run_is_reviewed_as_one_and_stores_nothing(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    await register(http, configuration(webhook.url, own.bundle, sideEffects="NoneOnDryRun"))
    assert (await send(http, "POST", MAPS, config_map(), params={"dryRun": "All"})).code == 201
    assert await stored(http, f"{MAPS}/m") is None
    assert (await send(http, "POST", MAPS, config_map())).code == 201
    assert (await send(http, "DELETE", f"{MAPS}/m", params={"dryRun": "All"})).code == 200
    assert await stored(http, f"{MAPS}/m") is not None
    assert [request["dryRun"] for request in webhook.reviewed] == [True, False, True]
    assert webhook.reviewed[0]["options"]["dryRun"] == ["All"]


async def test_webhook_with_side_effects_refuses_a_dry_run(
    api: Api, http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    await register(http, configuration(webhook.url, own.bundle))
    collection = ("admissionregistration.k8s.io", "validatingwebhookconfigurations")
    before_v1 = api.registry.store.get(collection, "", "check") or {}  # v1 accepts no webhook with side effects
    api.registry.store.put(collection, {**before_v1, "webhooks": [{**before_v1["webhooks"][0], "sideEffects": "Some"}]})
    answer = await send(http, "POST", MAPS, config_map(), params={"dryRun": "All"})
    assert (answer.code, answer.body["reason"]) == (400, "BadRequest")
    assert answer.body["message"] == f'admission webhook "{NAME}" does not support dry run'
    assert webhook.reviewed == []
    assert (await send(http, "POST", MAPS, config_map())).code == 201


async def test_webhooks_are_called_by_name_until_one_denies(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    for name in ("b.llmservice.io", "c.llmservice.io", "a.llmservice.io"):
        await register(http, configuration(webhook.url, own.bundle, name=name))
    webhook.respond = lambda _request: {"allowed": len(webhook.reviewed) < 2}
    answer = await send(http, "POST", MAPS, config_map())
    assert answer.body["message"] == 'admission webhook "b.llmservice.io" denied the request without explanation'
    assert len({request["uid"] for request in webhook.reviewed}) == 2


async def test_invalid_object_is_refused_before_any_webhook(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    await register(http, configuration(webhook.url, own.bundle, rule("deployments", "apps")))
    assert (await send(http, "POST", DEPLOYMENTS, deployment(replicas=-1))).code == 422
    assert webhook.reviewed == []


# -- which requests match ----------------------------------------------------------------------------------------------


async def test_subresources_are_reviewed_where_a_rule_names_them(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    rules = rule("deployments/status", "apps"), rule("deployments/scale", "apps")
    await register(http, configuration(webhook.url, own.bundle, *rules))
    assert (await send(http, "POST", DEPLOYMENTS, deployment())).code == 201
    assert (await send(http, "PUT", f"{DEPLOYMENTS}/d", deployment(2))).code == 200
    assert webhook.reviewed == []
    status = {"status": {"replicas": 2}}
    assert (await send(http, "PATCH", f"{DEPLOYMENTS}/d/status", status, headers=MERGE)).code == 200
    scale = await send(http, "PATCH", f"{DEPLOYMENTS}/d/scale", {"spec": {"replicas": 3}}, headers=MERGE)
    assert scale.body["spec"]["replicas"] == 3
    of_status, of_scale = webhook.reviewed
    assert (of_status["subResource"], of_status["object"]["status"]) == ("status", {"replicas": 2})
    assert (of_scale["subResource"], of_scale["kind"]["kind"], of_scale["resource"]["resource"]) == (
        "scale", "Scale", "deployments",
    )  # fmt: skip
    assert (of_scale["oldObject"]["spec"], of_scale["object"]["spec"]) == ({"replicas": 2}, {"replicas": 3})
    webhook.denies(code=403)
    assert (await send(http, "PUT", f"{DEPLOYMENTS}/d/scale", {**scale.body, "spec": {"replicas": 9}})).code == 403


@pytest.mark.parametrize(
    ("selector", "in_default", "in_team"),
    [
        ({"matchLabels": {"kubernetes.io/metadata.name": "team"}}, False, True),
        ({"matchExpressions": [{"key": "checked", "operator": "In", "values": ["yes"]}]}, False, True),
        ({"matchExpressions": [{"key": "checked", "operator": "DoesNotExist"}]}, True, False),
        ({}, True, True),
    ],
)
async def test_namespace_selector(
    http: ClientSession, webhook: Webhook, own: Certificate, selector: Object, in_default: bool, in_team: bool
) -> None:
    namespace = {"metadata": {"name": "team", "labels": {"checked": "yes"}}}
    assert (await send(http, "POST", "/api/v1/namespaces", namespace)).code == 201
    await register(http, configuration(webhook.url, own.bundle, namespaceSelector=selector))
    webhook.denies(code=403)
    assert (await send(http, "POST", MAPS, config_map())).code == (403 if in_default else 201)
    path = "/api/v1/namespaces/team/configmaps"
    assert (await send(http, "POST", path, config_map())).code == (403 if in_team else 201)


async def test_namespace_selector_takes_the_labels_of_a_namespace_itself(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    selector = {"matchLabels": {"checked": "yes"}}
    await register(http, configuration(webhook.url, own.bundle, rule("namespaces"), namespaceSelector=selector))
    webhook.denies(code=403)
    namespace: Object = {"metadata": {"name": "team"}}
    assert (await send(http, "POST", "/api/v1/namespaces", namespace)).code == 201
    labelled = {"metadata": {"name": "team", "labels": {"checked": "yes"}}}
    assert (await send(http, "PATCH", "/api/v1/namespaces/team", labelled, headers=MERGE)).code == 403
    assert (
        await send(http, "POST", "/api/v1/namespaces", {"metadata": {**labelled["metadata"], "name": "b"}})
    ).code == 403
    assert [request["namespace"] for request in webhook.reviewed] == ["team", "b"]


async def test_object_selector_takes_the_new_or_the_old_labels(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    selector = {"matchLabels": {"checked": "yes"}}
    await register(http, configuration(webhook.url, own.bundle, objectSelector=selector))
    assert (await send(http, "POST", MAPS, config_map())).code == 201
    assert len(webhook.reviewed) == 0
    assert (await send(http, "PUT", f"{MAPS}/m", config_map(labels={"checked": "yes"}))).code == 200
    assert (await send(http, "PUT", f"{MAPS}/m", config_map())).code == 200
    assert len(webhook.reviewed) == 2
    assert (await send(http, "DELETE", f"{MAPS}/m")).code == 200
    assert len(webhook.reviewed) == 2


async def test_webhook_of_everything_does_not_review_webhook_configurations(
    http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    await register(http, configuration(webhook.url, own.bundle, rule("*/*", "*")))
    webhook.denies(code=403)
    assert (await send(http, "POST", MAPS, config_map())).code == 403
    assert (await send(http, "DELETE", f"{HOOKS}/check")).code == 200
    assert (await send(http, "POST", MAPS, config_map())).code == 201


# -- writes during a review --------------------------------------------------------------------------------------------


async def test_patch_is_repeated_on_an_object_that_changed_during_the_review(
    api: Api, http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    assert (await send(http, "POST", MAPS, config_map(a="1"))).code == 201
    await register(http, configuration(webhook.url, own.bundle))

    def change_once(_request: Object) -> Object:
        if len(webhook.reviewed) == 1:
            found = api.registry.store.get(("", "configmaps"), "default", "m") or {}
            api.registry.store.put(("", "configmaps"), {**found, "data": {"a": "2"}})
        return {"allowed": True}

    webhook.respond = change_once
    answer = await send(http, "PATCH", f"{MAPS}/m", {"data": {"b": "1"}}, headers=MERGE)
    assert answer.body["data"] == {"a": "2", "b": "1"}
    assert [request["object"]["data"] for request in webhook.reviewed] == [{"a": "1", "b": "1"}, {"a": "2", "b": "1"}]


async def test_versioned_update_of_an_object_that_changed_during_the_review_is_a_conflict(
    api: Api, http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    created = await send(http, "POST", MAPS, config_map(a="1"))
    await register(http, configuration(webhook.url, own.bundle))

    def change(_request: Object) -> Object:
        found = api.registry.store.get(("", "configmaps"), "default", "m") or {}
        api.registry.store.put(("", "configmaps"), {**found, "data": {"a": "2"}})
        return {"allowed": True}

    webhook.respond = change
    assert (await send(http, "PUT", f"{MAPS}/m", {**created.body, "data": {"a": "3"}})).code == 409
    assert len(webhook.reviewed) == 1


async def test_object_deleted_during_its_review_stays_deleted(
    api: Api, http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    assert (await send(http, "POST", MAPS, config_map())).code == 201
    await register(http, configuration(webhook.url, own.bundle))

    def remove(_request: Object) -> Object:
        api.registry.store.remove(("", "configmaps"), "default", "m")
        return {"allowed": True}

    webhook.respond = remove
    assert (await send(http, "PUT", f"{MAPS}/m", config_map(a="1"))).code == 404
    assert await stored(http, f"{MAPS}/m") is None


async def test_collection_is_deleted_although_an_object_goes_during_its_review(
    api: Api, http: ClientSession, webhook: Webhook, own: Certificate
) -> None:
    for name in ("a", "b"):
        assert (await send(http, "POST", MAPS, config_map(name))).code == 201
    await register(http, configuration(webhook.url, own.bundle))

    def remove(request: Object) -> Object:
        if request["name"] == "a":
            api.registry.store.remove(("", "configmaps"), "default", "a")
        return {"allowed": True}

    webhook.respond = remove
    assert (await send(http, "DELETE", MAPS)).code == 200
    assert (await send(http, "GET", MAPS)).body["items"] == []


# -- webhooks that fail ------------------------------------------------------------------------------------------------


async def fails(http: ClientSession, message: str) -> None:
    """A creation fails with the message; with the failure policy Ignore it does not."""
    answer = await send(http, "POST", MAPS, config_map())
    assert (answer.code, answer.body["reason"]) == (500, "InternalError")
    assert f'Internal error occurred: failed calling webhook "{NAME}": {message}' in answer.body["message"]
    ignoring = {"webhooks": [{"name": NAME, "failurePolicy": "Ignore"}]}
    strategic = {"Content-Type": "application/strategic-merge-patch+json"}
    assert (await send(http, "PATCH", f"{HOOKS}/check", ignoring, headers=strategic)).code == 200
    assert (await send(http, "POST", MAPS, config_map())).code == 201


async def test_server_that_is_down(http: ClientSession, own: Certificate) -> None:
    async with AsyncExitStack() as stack:
        url = (await served(stack, own)).url
    await register(http, configuration(url, own.bundle))
    await fails(http, "failed to call webhook: Post")


async def test_server_with_a_certificate_of_another_authority(
    http: ClientSession, webhook: Webhook, tmp_path: Path
) -> None:
    await register(http, configuration(webhook.url, certificate(tmp_path, "other").bundle))
    await fails(http, "failed to call webhook: Post")
    assert webhook.reviewed == []


async def test_server_with_a_certificate_for_another_address(http: ClientSession, tmp_path: Path) -> None:
    elsewhere = certificate(tmp_path, "elsewhere", "10.0.0.1")
    async with AsyncExitStack() as stack:
        webhook = await served(stack, elsewhere)
        await register(http, configuration(webhook.url, elsewhere.bundle))
        await fails(http, "failed to call webhook: Post")
        assert webhook.reviewed == []


@pytest.mark.parametrize("bundle", ["", base64.b64encode(b"no certificate").decode()])
async def test_server_whose_certificate_is_not_signed_by_the_bundle(
    http: ClientSession, webhook: Webhook, bundle: str
) -> None:
    await register(http, configuration(webhook.url, bundle))
    await fails(http, "failed to call webhook: Post")
    assert webhook.reviewed == []


async def test_server_that_takes_too_long(http: ClientSession, webhook: Webhook, own: Certificate) -> None:
    await register(http, configuration(webhook.url, own.bundle, timeoutSeconds=1))
    webhook.respond = lambda _request: asyncio.get_running_loop().create_future()
    await fails(http, f'failed to call webhook: Post "{webhook.url}": context deadline exceeded')


async def test_service_is_out_of_reach(http: ClientSession) -> None:
    service = {"service": {"namespace": "default", "name": "hooks"}}
    await register(http, configuration("", "", clientConfig=service))
    await fails(http, "failed to call webhook: the emulated cluster has no service network")


async def test_webhook_that_only_knows_v1beta1(http: ClientSession, webhook: Webhook, own: Certificate) -> None:
    await register(http, configuration(webhook.url, own.bundle, admissionReviewVersions=["v1beta1"]))
    await fails(http, "could not create admission objects: webhook does not accept AdmissionReview v1")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.Response(status=404), "failed to call webhook: the server responded with status 404"),
        (web.Response(status=307, headers={"Location": "/"}), "failed to call webhook: the server responded with"),
        (web.Response(text="{"), "failed to call webhook: Post"),
        (web.Response(text="[]"), "received invalid webhook response: expected an AdmissionReview"),
        (web.Response(text="{}"), "received invalid webhook response: expected an AdmissionReview"),
        ({"uid": "x", "allowed": True}, 'received invalid webhook response: expected response.uid="'),
        ({"uid": None, "allowed": True}, 'received invalid webhook response: expected response.uid="'),
        ({"allowed": "yes"}, "received invalid webhook response: response.allowed: Invalid value"),
        ({"allowed": True, "warnings": "w"}, "received invalid webhook response: response.warnings: Invalid value"),
        ({"allowed": False, "status": {"code": "4"}}, "received invalid webhook response: response.status.code: Inval"),
    ],
)
async def test_response_that_is_not_a_review(
    http: ClientSession, webhook: Webhook, own: Certificate, answer: Any, message: str
) -> None:
    await register(http, configuration(webhook.url, own.bundle))

    def respond(_request: Object) -> Any:
        if isinstance(answer, web.Response):
            return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
        return answer

    webhook.respond = respond
    await fails(http, message)


# -- kubectl -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on the PATH: this test drives it")
async def test_kubectl_apply_prints_the_denial_and_the_warnings(
    api: Api, http: ClientSession, webhook: Webhook, own: Certificate, tmp_path: Path
) -> None:
    await register(http, configuration(webhook.url, own.bundle))
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
        "current-context": "c",
    }
    (tmp_path / "config").write_text(json.dumps(kubeconfig))

    async def kubectl(*arguments: str, stdin: str = "") -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            str(KUBECTL),
            *arguments,
            env={**os.environ, "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(40):
            output, _ = await process.communicate(stdin.encode())
        return process.returncode or 0, output.decode()

    manifest = json.dumps({"apiVersion": "v1", "kind": "ConfigMap", **config_map(a="1")})
    denial = {"code": 422, "reason": "Invalid", "message": "the cache does not fit: lower max_model_len"}
    webhook.respond = lambda _request: {"allowed": False, "status": denial, "warnings": ["a is “deprecated”"]}
    status, output = await kubectl("apply", "-f", "-", stdin=manifest)
    assert status == 1
    assert "Warning: a is “deprecated”\n" in output
    assert f'admission webhook "{NAME}" denied the request: {denial["message"]}\n' in output
    webhook.respond = lambda _request: {"allowed": True, "warnings": ["this is slow"]}
    status, output = await kubectl("apply", "-f", "-", stdin=manifest)
    assert (status, sorted(output.splitlines())) == (0, ["Warning: this is slow", "configmap/m created"])
    status, output = await kubectl("get", "validatingwebhookconfigurations", "--no-headers")
    assert output.split()[:2] == ["check", "1"]
