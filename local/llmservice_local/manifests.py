"""YAML manifests: server-side apply without kubectl, and a release of the chart as printed by `helm template`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmservice_local.client import NAMESPACES, Endpoint, KubeClient, Resource, connect, served_resources
from llmservice_local.errors import ApiError, bad_request
from llmservice_local.objects import Object


def read_manifest(path: Path) -> list[Any]:
    """The documents of a YAML file. Raises `ApiError` 400 if it is not YAML."""
    try:
        return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad_request(f"{path} is not YAML: {error}") from error


async def apply_manifest(endpoint: Endpoint, path: Path) -> list[str]:
    """Apply every object of the file in order; returns their names as `kind/name`. Raises `ApiError`."""
    documents = read_manifest(path)
    async with connect(endpoint, "llmservice-up") as client:
        served = {
            (version, resource["kind"]): Resource(version, resource["name"], resource["namespaced"])
            for version, resource in await served_resources(client)
        }
        return [await _apply(client, path, document, served) for document in documents]


async def _apply(client: KubeClient, path: Path, document: Any, served: dict[tuple[str, str], Resource]) -> str:
    if not isinstance(document, dict) or not (document.get("metadata") or {}).get("name"):
        raise bad_request(f"{path}: every document must be an object with metadata.name")
    api_version, kind = str(document.get("apiVersion")), str(document.get("kind"))
    resource = served.get((api_version, kind))
    if resource is None:
        raise ApiError(404, "NotFound", f"{path}: no matches for kind {kind!r} in version {api_version!r}")
    metadata = document["metadata"]
    namespace = metadata.get("namespace") or "default"
    await client.request(
        "PATCH",
        resource.path(namespace, metadata["name"]),
        document,
        query={"fieldManager": "llmservice-up", "force": "true", "fieldValidation": "Strict"},
        content_type="application/apply-patch+yaml",
    )
    return f"{kind.lower()}/{metadata['name']}"


_RBAC = "rbac.authorization.k8s.io/v1"
_ADMISSION = "admissionregistration.k8s.io/v1"
_ACCOUNTS = Resource("v1", "serviceaccounts")
_GRANTS = {
    "ServiceAccount": _ACCOUNTS,
    "Role": Resource(_RBAC, "roles"),
    "RoleBinding": Resource(_RBAC, "rolebindings"),
    "ClusterRole": Resource(_RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Resource(_RBAC, "clusterrolebindings", namespaced=False),
    "ValidatingAdmissionPolicy": Resource(_ADMISSION, "validatingadmissionpolicies", namespaced=False),
    "ValidatingAdmissionPolicyBinding": Resource(_ADMISSION, "validatingadmissionpolicybindings", namespaced=False),
}
_WEBHOOKS = Resource(_ADMISSION, "validatingwebhookconfigurations", namespaced=False)
_TOKEN_LIFETIME_S = 10 * 365 * 86400
"""The lifetime of tokens: longer than the cluster, whose signing key is deleted with it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A Deployment of the release: its account and its container's arguments."""

    namespace: str
    account: str
    arguments: tuple[str, ...]
    replicas: int


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the chart; `parts` by their command (operator, gateway)."""

    grants: tuple[Object, ...]
    parts: dict[str, Part]
    webhooks: tuple[Object, ...] = ()


def read_release(path: Path) -> Release:
    """Read the output of `helm template`; raises `ApiError` 400 if it is not YAML or has no operator Deployment."""
    documents = [one for one in read_manifest(path) if isinstance(one, dict)]
    parts = dict(_part(one) for one in documents if one.get("kind") == "Deployment" and _is_ours(one))
    if "operator" not in parts:
        raise bad_request(f"{path} has no Deployment of our operator: expected the output of `helm template`")
    grants = tuple(one for one in documents if one.get("kind") in _GRANTS)
    webhooks = tuple(one for one in documents if one.get("kind") == "ValidatingWebhookConfiguration")
    return Release(grants, parts, webhooks)


def _is_ours(manifest: Object) -> bool:
    """Whether an object is of the release itself, not one of its `extraObjects`."""
    labels = manifest["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/part-of") == "llmservice")


def _part(deployment: Object) -> tuple[str, Part]:
    pod = deployment["spec"]["template"]["spec"]
    command, *arguments = pod["containers"][0]["args"]
    namespace = deployment["metadata"]["namespace"]
    replicas = deployment["spec"].get("replicas", 1)
    return command, Part(namespace, pod["serviceAccountName"], tuple(arguments), replicas)


async def install_grants(client: KubeClient, release: Release) -> None:
    """Create the accounts, roles, policies and bindings, and their namespaces; raises `ApiError`."""
    namespaces = {one["metadata"].get("namespace") for one in release.grants} - {None}
    for name in sorted(namespaces):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await _create(client, NAMESPACES, None, body)
    for one in release.grants:
        await _create(client, _GRANTS[one["kind"]], one["metadata"].get("namespace"), one)


async def install_webhooks(client: KubeClient, release: Release, port: int) -> None:
    """Create the webhooks with the URL of a local port, as Services have no address here. Raises `ApiError`."""
    for one in release.webhooks:
        hooks = []
        for hook in one["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hooks.append({**hook, "clientConfig": {"url": f"https://127.0.0.1:{port}{path}"}})
        await _create(client, _WEBHOOKS, None, {**one, "webhooks": hooks})


async def issue_token(client: KubeClient, part: Part) -> str:
    """Issue a token for the part's account; raises `ApiError`."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": _TOKEN_LIFETIME_S},
    }
    answer = await client.request("POST", _ACCOUNTS.path(part.namespace, part.account, "token"), body)
    issued: str = answer["status"]["token"]
    return issued


async def _create(client: KubeClient, resource: Resource, namespace: str | None, body: Object) -> None:
    try:
        await client.create(resource, namespace, body)
    except ApiError as error:
        if error.code != 409:  # the namespace `default` always exists
            raise
