"""Applying the objects of a YAML file, server-side, for those who have no kubectl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from llmservice_local.api.errors import ApiError, bad_request
from llmservice_local.client import KubeClient, Resource, connect, served_resources
from llmservice_local.endpoint import Endpoint

Object = dict[str, Any]


def read_manifest(path: Path) -> list[Any]:
    """The documents of a YAML file. Raises `ApiError` 400 where it is none."""
    try:
        return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad_request(f"{path} is no YAML: {error}") from error


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
