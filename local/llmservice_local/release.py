"""A release of the chart, read from what `helm template` prints: who operator and gateway are, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmservice_local.api.errors import ApiError, bad_request
from llmservice_local.client import NAMESPACES, KubeClient, Resource
from llmservice_local.manifest import read_manifest

Object = dict[str, Any]

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
_NEVER_S = 10 * 365 * 86400
"""Tokens outlive the cluster, whose signing key dies with it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A Deployment of the release: its account, and how its container is called."""

    namespace: str
    account: str
    arguments: tuple[str, ...]
    replicas: int


@dataclass(frozen=True, slots=True)
class Release:
    """`parts` by the command that they run (operator, gateway)."""

    grants: tuple[Object, ...]
    parts: dict[str, Part]
    webhooks: tuple[Object, ...] = ()


def read_release(path: Path) -> Release:
    """Raises `ApiError` 400 where the file is no YAML, or has no Deployment that runs the operator."""
    documents = [one for one in read_manifest(path) if isinstance(one, dict)]
    parts = dict(_part(one) for one in documents if one.get("kind") == "Deployment" and _is_ours(one))
    if "operator" not in parts:
        raise bad_request(f"{path} has no Deployment of our operator: expected what `helm template` prints")
    grants = tuple(one for one in documents if one.get("kind") in _GRANTS)
    webhooks = tuple(one for one in documents if one.get("kind") == "ValidatingWebhookConfiguration")
    return Release(grants, parts, webhooks)


def _is_ours(manifest: Object) -> bool:
    """Not one of the chart's extra objects."""
    labels = manifest["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/part-of") == "llmservice")


def _part(deployment: Object) -> tuple[str, Part]:
    pod = deployment["spec"]["template"]["spec"]
    command, *arguments = pod["containers"][0]["args"]
    namespace = deployment["metadata"]["namespace"]
    replicas = deployment["spec"].get("replicas", 1)
    return command, Part(namespace, pod["serviceAccountName"], tuple(arguments), replicas)


async def install_grants(client: KubeClient, release: Release) -> None:
    """Create the accounts, roles, policies and bindings, and the namespaces that they are in; raises `ApiError`."""
    namespaces = {one["metadata"].get("namespace") for one in release.grants} - {None}
    for name in sorted(namespaces):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await _create(client, NAMESPACES, None, body)
    for one in release.grants:
        await _create(client, _GRANTS[one["kind"]], one["metadata"].get("namespace"), one)


async def install_webhooks(client: KubeClient, release: Release, port: int) -> None:
    """Create the webhooks, called on a port of this machine, for no Service has an address here. Raises `ApiError`."""
    for one in release.webhooks:
        hooks = []
        for hook in one["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hooks.append({**hook, "clientConfig": {"url": f"https://127.0.0.1:{port}{path}"}})
        await _create(client, _WEBHOOKS, None, {**one, "webhooks": hooks})


async def token(client: KubeClient, part: Part) -> str:
    """A token of the part's account; raises `ApiError`."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": _NEVER_S},
    }
    answer = await client.request("POST", _ACCOUNTS.path(part.namespace, part.account, "token"), body)
    issued: str = answer["status"]["token"]
    return issued


async def _create(client: KubeClient, resource: Resource, namespace: str | None, body: Object) -> None:
    try:
        await client.create(resource, namespace, body)
    except ApiError as error:
        if error.code != 409:  # `default` is always there
            raise
