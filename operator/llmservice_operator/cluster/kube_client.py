"""The few requests that the operator sends to the API server, as plain data in and out.

The generated client is used for what it knows best, credentials and TLS; its typed models would reject unknown fields.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import aiohttp
from kubernetes.aio import client as kubernetes_client

from llmservice_operator.api.kinds import ChildKind
from llmservice_operator.api.resource import GROUP, MANAGER, PLURAL, VERSION
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.configuration import load_configuration
from llmservice_operator.cluster.priority_gate import PriorityGate

REQUEST_TIMEOUT_S = 10.0
WATCH_S = 300
"""After so long the API server ends a watch by itself."""
PAGE = 100
"""Objects of one answer: what a larger one takes while it is parsed is never given back to the system."""
_IN_FLIGHT = 16
"""Requests at once. Those that wait don't run out of time: a slow API server gets slow work, and none of it twice."""
_LOG_LIMIT_BYTES = 4096
_STATUS_S, _EVENT_S = 5.0, 10.0
"""How long what tells of a change can wait for the changes themselves."""
_LONGEST_RETRY_AFTER_S = 120.0
"""Longer than any API server asks for; an hour from a proxy in between must not stop the operator for one."""

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"


class KubeError(Exception):
    """The API server said no, or could not be reached (`status` 0).

    `reason` is the API server's own word for it; before `retry_after_s` have passed it wants not to be asked again.
    """

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def passes(self) -> bool:
        """Whether the same request may well be answered differently in a moment."""
        return self.status in {0, 409, 410, 429} or self.status >= 500


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: Mapping[str, Any] | None = None
    content_type: str = _MERGE


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back. The request, which may hold what should not be logged, is never part of an error."""

    status: int
    body: bytes
    retry_after: str

    def raise_for_status(self, method: str, path: str) -> None:
        if self.status < 400:
            return
        try:
            told = json.loads(self.body)
            message, reason = str(told["message"]), str(told.get("reason", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            message, reason = self.body[:200].decode("utf-8", errors="replace"), ""
        wait_s = min(float(self.retry_after), _LONGEST_RETRY_AFTER_S) if self.retry_after.isdecimal() else 0.0
        raise KubeError(self.status, f"{method} {path}: {self.status} {message}", reason=reason, retry_after_s=wait_s)

    def object(self, method: str, path: str) -> Manifest:
        """The object that was answered; raises KubeError where it is none, as from a proxy that lost its way."""
        try:
            return dict(json.loads(self.body)) if self.body else {}
        except (ValueError, TypeError) as error:
            raise KubeError(0, f"{method} {path}: the answer is no JSON object") from error


class KubeClient:
    """One connection pool to the API server that KUBECONFIG, or the pod's service account, names."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._queue = PriorityGate(_IN_FLIGHT)
        self.may_write_s: Callable[[], float] | None = None
        """For how long, in seconds, this process may write; None: for ever."""
        self.answered: Callable[[str, str, int, float], None] | None = None
        """Told of every request: method, path, status (0: no answer) and seconds."""

    @classmethod
    async def connect(cls, context: str | None = None) -> Self:
        return cls.of(await load_configuration(context))

    @classmethod
    def of(cls, configuration: Any) -> Self:
        """With the official client's configuration: its TLS, credentials and proxy."""
        return cls(kubernetes_client.ApiClient(configuration))

    async def close(self) -> None:
        await self._api.close()

    async def get_service(self, namespace: str, name: str) -> Manifest | None:
        return await self._get(_service_path(namespace, name))

    async def get_child(self, kind: ChildKind, namespace: str, name: str) -> Manifest | None:
        return await self._get(_child_path(kind, namespace, name))

    async def delete_child(self, kind: ChildKind, namespace: str, name: str, *, uid: str) -> None:
        """Delete exactly the object with this uid; one that is gone, or is another by now, is left alone."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self.request(
                "DELETE", _child_path(kind, namespace, name), body=options, content_type="application/json"
            )
        except KubeError as error:
            if error.status not in {404, 409}:
                raise

    async def apply(self, kind: ChildKind, manifest: Manifest, *, force: bool = True) -> Manifest:
        """Server-side apply: own every field of `manifest`; with `force`, taking over from whoever changed it."""
        path = _child_path(kind, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        query = {"fieldManager": MANAGER, "force": str(force).lower()}
        return await self.request("PATCH", path, body=manifest, content_type=_APPLY, query=query)

    async def list_all(self, path: str, selector: str = "") -> tuple[list[Manifest], str]:
        """A whole collection, read page by page, and the resource version that it was listed at."""
        objects: list[Manifest] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            answer = await self.request("GET", path, query=query)
            for one in answer.get("items") or []:
                one["metadata"].pop("managedFields", None)  # the larger part of most objects, and nobody reads it
                objects.append(_typed(answer, one))
            metadata = answer.get("metadata") or {}
            if not (token := metadata.get("continue")):
                return objects, str(metadata.get("resourceVersion", ""))
            query = {**query, "continue": token}

    async def list_pods(self, namespace: str, selector: str) -> list[Manifest]:
        return (await self.list_all(f"/api/v1/namespaces/{quote(namespace)}/pods", selector))[0]

    async def annotate_pod(self, namespace: str, name: str, annotations: Mapping[str, str]) -> Manifest | None:
        """Set annotations on a pod; one that is gone by now needs none."""
        path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(name)}"
        try:
            return await self.request("PATCH", path, body={"metadata": {"annotations": dict(annotations)}})
        except KubeError as error:
            if error.status != 404:
                raise
        return None

    async def patch_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Manifest:
        path = f"{_service_path(namespace, name)}/status"
        return await self.request(
            "PATCH", path, body={"status": dict(status)}, query={"fieldManager": MANAGER}, patience_s=_STATUS_S
        )

    async def read_log(self, namespace: str, name: str, container: str, *, previous: bool) -> str:
        """The last line of a container's log, of the one before the last restart where `previous`; raises KubeError."""
        path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(name)}/log"
        query = {"container": container, "tailLines": "1", "limitBytes": str(_LOG_LIMIT_BYTES)}
        query |= {"previous": "true"} if previous else {}
        answer = await _read(await self._open(_Request("GET", path, query), REQUEST_TIMEOUT_S))
        answer.raise_for_status("GET", path)
        return answer.body.decode("utf-8", errors="replace")

    async def list_events(self, namespace: str, fields: str) -> list[Manifest]:
        path = f"/api/v1/namespaces/{quote(namespace)}/events"
        answer = await self.request("GET", path, query={"fieldSelector": fields})
        return list(answer.get("items") or [])

    async def create_event(self, event: Manifest) -> None:
        path = f"/api/v1/namespaces/{quote(event['metadata']['namespace'])}/events"
        await self.request("POST", path, body=event, content_type="application/json", patience_s=_EVENT_S)

    async def patch_event(self, namespace: str, name: str, change: Mapping[str, Any]) -> bool:
        """Change an Event; False once it is gone, as Events are after an hour."""
        path = f"/api/v1/namespaces/{quote(namespace)}/events/{quote(name)}"
        try:
            await self.request("PATCH", path, body=dict(change), patience_s=_EVENT_S)
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = _MERGE,
        query: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        patience_s: float = 0.0,
        urgent: bool = False,
    ) -> Manifest:
        """One request; raises KubeError. A write is refused, and ended, where the fence says so.

        Where many wait, one with `patience_s` more seconds lets others past for so long.

        `urgent` is for the lease alone: past the fence, which is made of it, and past the queue.
        """
        request = _Request(method, path, query, body, content_type)
        if urgent:
            return await self._timed(request, timeout_s)
        async with self._queue.place(patience_s):
            left_s = math.inf if method == "GET" else self._fenced()
            return await self._timed(request, min(timeout_s, left_s))

    async def _timed(self, request: _Request, timeout_s: float) -> Manifest:
        started = time.monotonic()
        status = 0
        try:
            answer = await _read(await self._open(request, timeout_s))
            status = answer.status
        finally:
            if self.answered is not None:
                self.answered(request.method, request.path, status, time.monotonic() - started)
        answer.raise_for_status(request.method, request.path)
        return answer.object(request.method, request.path)

    async def _open(self, request: _Request, limit: float | aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        prepared = await self._api.param_serialize(
            request.method,
            request.path,
            query_params=list((request.query or {}).items()),
            header_params=headers,
            body=request.body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(*prepared, _request_timeout=limit)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from error
        response: aiohttp.ClientResponse = answer.response
        return response

    def _fenced(self) -> float:
        left_s = math.inf if self.may_write_s is None else self.may_write_s()
        if left_s <= 0:
            raise KubeError(0, "not written: this process does not hold the lease")
        return left_s

    async def _get(self, path: str) -> Manifest | None:
        try:
            return await self.request("GET", path)
        except KubeError as error:
            if error.status == 404:
                return None
            raise


async def _read(response: aiohttp.ClientResponse) -> _Answer:
    try:
        return _Answer(response.status, await response.read(), response.headers.get("Retry-After", ""))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> KubeError:
    return KubeError(0, f"the API server can't be reached ({type(error).__name__})")


def _service_path(namespace: str, name: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{quote(namespace)}/{PLURAL}/{quote(name)}"


def _child_path(kind: ChildKind, namespace: str, name: str) -> str:
    root = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.api_version}"
    return f"{root}/namespaces/{quote(namespace)}/{kind.plural}/{quote(name)}"


def _typed(collection: Manifest, item: Manifest) -> Manifest:
    """The API server leaves apiVersion and kind out of the items of built-in lists, and has them in everything else."""
    kind = str(collection.get("kind", "")).removesuffix("List")
    return {"apiVersion": collection.get("apiVersion"), "kind": kind, **item}
