"""A small client of any Kubernetes API for controllers and the node; objects are dicts, errors are `ApiError`."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from llmservice_local.errors import ApiError
from llmservice_local.objects import Object

REQUEST_TIMEOUT_S = 15.0
WATCH_S = 300
_LONGEST_EVENT_BYTES = 4 * 1024 * 1024
_MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Resource:
    """A collection of the API."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(part for part in (f"{root}{scope}/{self.plural}", name, subresource) if part)


PODS = Resource("v1", "pods")
NODES = Resource("v1", "nodes", namespaced=False)
EVENTS = Resource("v1", "events")
SERVICES = Resource("v1", "services")
CONFIG_MAPS = Resource("v1", "configmaps")
SECRETS = Resource("v1", "secrets")
CLAIMS = Resource("v1", "persistentvolumeclaims")
NAMESPACES = Resource("v1", "namespaces", namespaced=False)
ENDPOINTS = Resource("v1", "endpoints")
ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "endpointslices")
DEPLOYMENTS = Resource("apps/v1", "deployments")
REPLICA_SETS = Resource("apps/v1", "replicasets")
DISRUPTION_BUDGETS = Resource("policy/v1", "poddisruptionbudgets")
DEFINITIONS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)


class KubeClient:
    """Requests to one API server over one session. Nothing is retried; that is up to the caller's loop."""

    def __init__(self, session: ClientSession, endpoint: Endpoint) -> None:
        self._session = session
        self._endpoint = endpoint

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return await self.request("GET", resource.path(namespace, name))

    async def list(self, resource: Resource, namespace: str | None = None, **query: str) -> Object:
        """The whole list object: `items`, and the `resourceVersion` to watch from in its metadata."""
        return await self.request("GET", resource.path(namespace), query=query)

    async def create(self, resource: Resource, namespace: str | None, obj: Object) -> Object:
        return await self.request("POST", resource.path(namespace), obj)

    async def bind(self, pod: Mapping[str, Any], node: str) -> None:
        """Assign a pod to a node."""
        metadata = pod["metadata"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self.request("POST", PODS.path(metadata["namespace"], metadata["name"], "binding"), binding)

    async def merge(
        self, resource: Resource, obj: Mapping[str, Any], patch: Object, *, subresource: str = "", locked: bool = False
    ) -> Object:
        """Merge-patch an object; with `locked`, a conflict is raised if it has changed since it was read."""
        metadata = obj["metadata"]
        if locked:
            guard = {"resourceVersion": metadata["resourceVersion"]}
            patch = {**patch, "metadata": {**(patch.get("metadata") or {}), **guard}}
        path = resource.path(metadata.get("namespace"), metadata["name"], subresource)
        return await self.request("PATCH", path, patch, content_type=_MERGE)

    async def delete(
        self, resource: Resource, obj: Mapping[str, Any], *, propagation: str = "Background", grace_s: int | None = None
    ) -> Object | None:
        """Delete exactly this object, by uid; None if it no longer exists."""
        metadata = obj["metadata"]
        options: Object = {"propagationPolicy": propagation, "preconditions": {"uid": metadata["uid"]}}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            return await self.request("DELETE", resource.path(metadata.get("namespace"), metadata["name"]), options)
        except ApiError as error:
            if error.code in {404, 409}:  # deleted, or replaced by another of the same name
                return None
            raise

    async def watch(self, resource: Resource, since: str) -> AsyncIterator[Object]:
        """The events of a collection after a resource version, until the server ends the watch."""
        query = {
            "watch": "true",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = ClientTimeout(total=None, sock_connect=5, sock_read=WATCH_S + 30)
        async with self._session.get(self._endpoint.url + resource.path(), params=query, timeout=timeout) as response:
            if response.status != 200:
                raise _refusal(response.status, await response.read())
            buffer = b""
            async for chunk in response.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                if len(buffer) > _LONGEST_EVENT_BYTES:
                    raise ApiError(500, "InternalError", f"a watch event is longer than {_LONGEST_EVENT_BYTES} bytes")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                    yield event

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send one request; raises `ApiError` for an error response or an unreachable server (code 503)."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if data is not None else {}
        try:
            async with self._session.request(
                method, self._endpoint.url + path, params=query or {}, data=data, headers=headers
            ) as response:
                raw = await response.read()
        except (ClientError, TimeoutError) as error:
            message = f"the API server at {self._endpoint.url} cannot be reached: {error}"
            raise ApiError(503, "ServiceUnavailable", message) from error
        if response.status >= 400:
            raise _refusal(response.status, raw)
        answer: Object = json.loads(raw)
        return answer


@asynccontextmanager
async def connect(endpoint: Endpoint, user_agent: str) -> AsyncIterator[KubeClient]:
    """A client until the block ends; `user_agent` becomes the manager in `managedFields`."""
    headers = {**endpoint.headers(), "User-Agent": user_agent}
    connector = TCPConnector(ssl=endpoint.ssl_context(), limit=0)
    timeout = ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        yield KubeClient(session, endpoint)
    await asyncio.sleep(0)  # let the transports' close callbacks run before the loop is closed


async def served_resources(client: KubeClient) -> list[tuple[str, Object]]:
    """The (apiVersion, resource) pairs of each group's preferred version from discovery, without subresources."""
    groups = (await client.request("GET", "/apis"))["groups"]
    found: list[tuple[str, Object]] = []
    for version in ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]:
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        try:
            listed = await client.request("GET", path)
        except ApiError as error:
            if error.code == 404:  # its last CRD was deleted after the groups were listed
                continue
            raise
        found += [(version, resource) for resource in listed["resources"] if "/" not in resource["name"]]
    return found


def _refusal(code: int, raw: bytes) -> ApiError:
    try:
        status = json.loads(raw)
        return ApiError(code, status.get("reason", ""), status.get("message", ""))
    except (ValueError, AttributeError):
        return ApiError(code, "Unknown", raw.decode(errors="replace")[:500])


CONTEXT = "llmservice-local"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The URL and credentials of an API server. The emulated one needs no token and no certificate."""

    url: str
    token: str | None = None
    ca_file: Path | None = None

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ssl_context(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=str(self.ca_file)) if self.ca_file else True

    def write_kubeconfig(self, path: Path) -> None:
        """Write a kubeconfig; only its owner may read it, because it contains the token."""
        cluster: dict[str, Any] = {"server": self.url}
        if self.ca_file is not None:
            cluster["certificate-authority"] = str(self.ca_file)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": CONTEXT, "cluster": cluster}],
            "users": [{"name": CONTEXT, "user": {"token": self.token} if self.token else {}}],
            "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT, "namespace": "default"}}],
            "current-context": CONTEXT,
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
