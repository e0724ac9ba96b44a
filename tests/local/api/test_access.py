"""Roles in the emulated API: what an account may do, as the real API server judges it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from llmservice_local.api.serve import serve_api

RBAC = "/apis/rbac.authorization.k8s.io/v1"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
CONFIG_MAPS = "/api/v1/namespaces/{}/configmaps"
SUBJECT = {"kind": "ServiceAccount", "name": "worker", "namespace": "default"}
APPLY = "application/apply-patch+yaml"


@dataclass
class Cluster:
    """The administrator's session, and what the API noted of the account."""

    http: ClientSession
    audit: Path
    token: str = ""

    async def create(self, path: str, body: dict[str, Any]) -> Any:
        async with self.http.post(path, json=body) as response:
            assert response.status == 201, await response.text()
            return await response.json()

    async def grant(self, namespace: str | None, *rules: dict[str, Any], subject: dict[str, Any] = SUBJECT) -> None:
        kind = "Role" if namespace else "ClusterRole"
        root = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
        await self.create(f"{root}/{kind.lower()}s", {"metadata": {"name": "some"}, "rules": list(rules)})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "some"}
        binding = {"metadata": {"name": "some"}, "roleRef": reference, "subjects": [subject]}
        await self.create(f"{root}/{kind.lower()}bindings", binding)

    async def ask(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> int:
        """The answer's code to the account."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content_type}
        data = None if body is None else json.dumps(body)
        async with self.http.request(method, path, headers=headers, data=data) as response:
            return response.status


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with serve_api(audit=tmp_path / "audit.log") as api, ClientSession(api.url) as http:
        running = Cluster(http, tmp_path / "audit.log")
        await running.create(ACCOUNTS, {"metadata": {"name": "worker"}})
        issued = await running.create(f"{ACCOUNTS}/worker/token", {"spec": {}})
        running.token = issued["status"]["token"]
        yield running


def rule(resources: str, *verbs: str, group: str = "", names: list[str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"apiGroups": [group], "resources": [resources], "verbs": list(verbs)}
    return found | ({"resourceNames": names} if names else {})


async def test_without_a_role_an_account_can_read_discovery_only(cluster: Cluster) -> None:
    assert await cluster.ask("GET", "/apis") == 200
    assert await cluster.ask("GET", CONFIG_MAPS.format("default")) == 403


async def test_an_unknown_token_is_unauthorized(cluster: Cluster) -> None:
    cluster.token = "made-up"

    assert await cluster.ask("GET", "/apis") == 401


async def test_the_administrator_acts_as_an_account_with_the_rights_of_it(cluster: Cluster) -> None:
    await cluster.grant("default", rule("configmaps", "list"))
    user = {"Impersonate-User": "system:serviceaccount:default:worker"}
    codes = []
    sender = {"Authorization": f"Bearer {cluster.token}"}
    for headers in (user, {"Impersonate-User": ""}, {"Impersonate-User": "alice"}, user | sender):
        for resources in ("configmaps", "secrets"):
            path = f"/api/v1/namespaces/default/{resources}"
            async with cluster.http.get(path, headers=headers) as response:
                codes.append(response.status)
    assert codes == [200, 403, 200, 200, 403, 403, 403, 403]


@pytest.mark.parametrize(
    ("headers", "attributes", "allowed"),
    [
        ({}, {"verb": "delete", "resource": "secrets"}, True),
        ({"Impersonate-User": "system:serviceaccount:default:worker"}, {"verb": "list"}, True),
        ({"Impersonate-User": "system:serviceaccount:default:worker"}, {"verb": "get"}, False),
        ({"Impersonate-User": "system:serviceaccount:default:worker"}, {"verb": "list", "namespace": None}, False),
        ({"Impersonate-User": "system:serviceaccount:default:other"}, {"verb": "list"}, False),
    ],
)
async def test_access_review_answers_what_a_request_would_get(
    cluster: Cluster, headers: dict[str, str], attributes: dict[str, Any], allowed: bool
) -> None:
    await cluster.grant("default", rule("configmaps", "list"))
    body = {"spec": {"resourceAttributes": {"namespace": "default", "resource": "configmaps", **attributes}}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    async with cluster.http.post(path, json=body, headers=headers) as response:
        assert response.status == 201
        assert (await response.json())["status"] == {"allowed": allowed}


@pytest.mark.parametrize(
    ("verb", "method", "path"),
    [
        ("list", "GET", ""),
        ("watch", "GET", "?watch=1&timeoutSeconds=1"),
        ("get", "GET", "/one"),
        ("create", "POST", ""),
        ("patch", "PATCH", "/one"),
        ("update", "PUT", "/one"),
        ("delete", "DELETE", "/one"),
        ("deletecollection", "DELETE", ""),
    ],
)
async def test_each_verb_needs_a_rule(cluster: Cluster, verb: str, method: str, path: str) -> None:
    await cluster.create(CONFIG_MAPS.format("default"), {"metadata": {"name": "one"}})
    body = {"metadata": {"name": "two" if method == "POST" else "one"}} if method in {"POST", "PUT", "PATCH"} else None
    content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
    others = {"list", "watch", "get", "create", "patch", "update", "delete", "deletecollection"} - {verb}
    await cluster.grant("default", rule("configmaps", *others))
    assert await cluster.ask(method, CONFIG_MAPS.format("default") + path, body, content_type) == 403
    await cluster.grant(None, rule("configmaps", verb))
    assert await cluster.ask(method, CONFIG_MAPS.format("default") + path, body, content_type) in {200, 201}


async def test_a_role_applies_to_its_namespace_and_a_cluster_role_to_all(cluster: Cluster) -> None:
    await cluster.create("/api/v1/namespaces", {"metadata": {"name": "other"}})
    await cluster.grant("default", rule("configmaps", "list"))
    assert await cluster.ask("GET", CONFIG_MAPS.format("default")) == 200
    assert await cluster.ask("GET", CONFIG_MAPS.format("other")) == 403
    assert await cluster.ask("GET", "/api/v1/configmaps") == 403
    await cluster.grant(None, rule("configmaps", "list"))
    assert await cluster.ask("GET", "/api/v1/configmaps") == 200


async def test_group_name_and_subresource_count(cluster: Cluster) -> None:
    leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    await cluster.create(leases, {"metadata": {"name": "ours"}})
    await cluster.create(leases, {"metadata": {"name": "theirs"}})
    await cluster.grant(
        "default",
        rule("leases", "get", group="coordination.k8s.io", names=["ours"]),
        rule("deployments", "get", group="extensions"),
        rule("deployments/scale", "get", group="apps"),
    )
    deployments = "/apis/apps/v1/namespaces/default/deployments/absent"

    assert await cluster.ask("GET", f"{leases}/ours") == 200
    assert await cluster.ask("GET", f"{leases}/theirs") == 403
    assert await cluster.ask("GET", leases) == 403
    assert await cluster.ask("GET", deployments) == 403
    assert await cluster.ask("GET", f"{deployments}/scale") == 404


async def test_an_apply_that_creates_needs_both_rights(cluster: Cluster) -> None:
    path = CONFIG_MAPS.format("default") + "/applied?fieldManager=worker"
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "applied"}, "data": {"a": "b"}}
    await cluster.grant("default", rule("configmaps", "patch"))
    assert await cluster.ask("PATCH", path, body, APPLY) == 403
    await cluster.grant(None, rule("configmaps", "create"))
    assert await cluster.ask("PATCH", path, body, APPLY) == 201


@pytest.mark.parametrize(
    ("subject", "status"),
    [
        ({"kind": "Group", "name": "system:serviceaccounts:default"}, 200),
        ({"kind": "User", "name": "system:serviceaccount:default:worker"}, 200),
        ({"kind": "ServiceAccount", "name": "worker", "namespace": "other"}, 403),
        ({"kind": "Group", "name": "system:serviceaccounts:other"}, 403),
    ],
)
async def test_subjects_of_a_binding(cluster: Cluster, subject: dict[str, Any], status: int) -> None:
    await cluster.grant(None, rule("configmaps", "list"), subject=subject)

    assert await cluster.ask("GET", "/api/v1/configmaps") == status


async def test_the_audit_log_contains_refusals_and_no_token(cluster: Cluster) -> None:
    await cluster.ask("GET", "/api/v1/secrets")

    (event,) = map(json.loads, cluster.audit.read_text(encoding="utf-8").splitlines())
    assert event["user"]["username"] == "system:serviceaccount:default:worker"
    assert (event["verb"], event["requestURI"], event["responseStatus"]["code"]) == ("list", "/api/v1/secrets", 403)
    assert event["responseStatus"]["message"] == (
        'secrets is forbidden: User "system:serviceaccount:default:worker" cannot list resource "secrets" '
        'in API group "" at the cluster scope'
    )
    assert cluster.token not in cluster.audit.read_text(encoding="utf-8")
