"""The requests that the operator sends to the API server, as plain data in and out.

The official client supplies credentials and TLS; its typed models would reject unknown fields.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import yaml
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from llmservice_operator.api.kinds import EVENTS, LLMSERVICES, PODS, Kind
from llmservice_operator.api.resource import MANAGER
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.priority_gate import PriorityGate

REQUEST_TIMEOUT_S = 10.0
WATCH_S = 300
"""The API server ends a watch after this time."""
PAGE = 100
"""Objects of one answer: the memory that parsing a larger one needs is never returned to the system."""
_IN_FLIGHT = 16
"""Requests at once. Waiting does not count against the timeout, so that a slow API server gets no request twice."""
_LOG_LIMIT_BYTES = 4096
_STATUS_S, _EVENT_S = 5.0, 10.0
"""How long status writes and Events can wait behind the changes themselves."""
_LONGEST_RETRY_AFTER_S = 120.0
"""Longer than any API server asks for; a proxy's hour must not stop the operator for that long."""

APPLY = "application/apply-patch+yaml"
JSON = "application/json"
_MERGE = "application/merge-patch+json"

KUBECONFIG_ERRORS = (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError)
"""What the client raises, beside ConfigException, for a file that cannot be read or is no kubeconfig."""


class KubeError(Exception):
    """The API server refused a request, or could not be reached (`status` 0).

    `reason` is the API server's; no request should be sent before `retry_after_s` have passed.
    """

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed in a moment."""
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
    """The response. The request, which may hold secrets, is never part of an error."""

    status: int
    body: bytes
    retry_after: str

    def raise_for_status(self, method: str, path: str) -> None:
        if self.status < 400:
            return
        try:
            failure = json.loads(self.body)
            message, reason = str(failure["message"]), str(failure.get("reason", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            message, reason = self.body[:200].decode("utf-8", errors="replace"), ""
        wait_s = min(float(self.retry_after), _LONGEST_RETRY_AFTER_S) if self.retry_after.isdecimal() else 0.0
        raise KubeError(self.status, f"{method} {path}: {self.status} {message}", reason=reason, retry_after_s=wait_s)

    def object(self, method: str, path: str) -> Manifest:
        """The response's object; raises KubeError for anything else, such as a proxy's error page."""
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
        """For how many seconds this process may write; None: without end."""
        self.answered: Callable[[str, str, int, float], None] | None = None
        """Called after every request: method, path, status (0: no answer) and seconds."""

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
        return await self.find("GET", LLMSERVICES.path(namespace, name))

    async def get_child(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return await self.find("GET", kind.path(namespace, name))

    async def delete_child(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete exactly the object with this uid; one that is gone, or was replaced, is left alone."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self.find("DELETE", kind.path(namespace, name), body=options, content_type=JSON)
        except KubeError as error:
            if error.status != 409:
                raise

    async def apply(self, kind: Kind, manifest: Manifest, *, force: bool = True) -> Manifest:
        """Server-side apply: own every field of `manifest`; with `force`, also those that others own."""
        path = kind.path(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        query = {"fieldManager": MANAGER, "force": str(force).lower()}
        return await self.request("PATCH", path, body=manifest, content_type=APPLY, query=query)

    async def list_all(
        self, path: str, selector: str = "", keep: Callable[[Manifest], Manifest] = lambda one: one
    ) -> tuple[list[Manifest], str]:
        """A whole collection, read page by page, and the resource version that it was listed at.

        `keep` may return another object for each, so that there is never a second copy of all that the caller has.
        """
        objects: list[Manifest] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            answer = await self.request("GET", path, query=query)
            for one in answer.get("items") or []:
                one["metadata"].pop("managedFields", None)  # the larger part of most objects, and unused
                objects.append(keep(_typed(answer, one)))
            metadata = answer.get("metadata") or {}
            if not (token := metadata.get("continue")):
                return objects, str(metadata.get("resourceVersion", ""))
            query = {**query, "continue": token}

    async def list_pods(self, namespace: str, selector: str) -> list[Manifest]:
        return (await self.list_all(PODS.path(namespace), selector))[0]

    async def annotate_pod(self, namespace: str, name: str, annotations: Mapping[str, str]) -> Manifest | None:
        """Set annotations on a pod; None where it is gone."""
        body = {"metadata": {"annotations": dict(annotations)}}
        return await self.find("PATCH", PODS.path(namespace, name), body=body)

    async def patch_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Manifest:
        path = f"{LLMSERVICES.path(namespace, name)}/status"
        return await self.request(
            "PATCH", path, body={"status": dict(status)}, query={"fieldManager": MANAGER}, patience_s=_STATUS_S
        )

    async def read_log(self, namespace: str, name: str, container: str, *, previous: bool) -> str:
        """The last line of a container's log, with `previous` that before its last restart; raises KubeError."""
        path = f"{PODS.path(namespace, name)}/log"
        query = {"container": container, "tailLines": "1", "limitBytes": str(_LOG_LIMIT_BYTES)}
        query |= {"previous": "true"} if previous else {}
        answer = await _read(await self._open(_Request("GET", path, query), REQUEST_TIMEOUT_S))
        answer.raise_for_status("GET", path)
        return answer.body.decode("utf-8", errors="replace")

    async def list_events(self, namespace: str, fields: str) -> list[Manifest]:
        answer = await self.request("GET", EVENTS.path(namespace), query={"fieldSelector": fields})
        return list(answer.get("items") or [])

    async def create_event(self, event: Manifest) -> None:
        path = EVENTS.path(event["metadata"]["namespace"])
        await self.request("POST", path, body=event, content_type=JSON, patience_s=_EVENT_S)

    async def patch_event(self, namespace: str, name: str, change: Mapping[str, Any]) -> bool:
        """Change an Event; False once it is gone, as Events are after an hour."""
        path = EVENTS.path(namespace, name)
        return await self.find("PATCH", path, body=dict(change), patience_s=_EVENT_S) is not None

    async def find(self, method: str, path: str, **options: Any) -> Manifest | None:
        """Like `request`; None where there is no such object."""
        try:
            return await self.request(method, path, **options)
        except KubeError as error:
            if error.status != 404:
                raise
        return None

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
        """One request; raises KubeError. A write is refused, and cut off, when this process may no longer write.

        `patience_s` is for how long requests that come later may overtake this one in the queue.

        `urgent` is for the lease alone: without the queue, and without the fence, which depends on the lease.
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


async def _read(response: aiohttp.ClientResponse) -> _Answer:
    try:
        return _Answer(response.status, await response.read(), response.headers.get("Retry-After", ""))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> KubeError:
    return KubeError(0, f"the API server can't be reached ({type(error).__name__})")


def _typed(collection: Manifest, item: Manifest) -> Manifest:
    """The API server omits apiVersion and kind in the items of built-in lists."""
    kind = str(collection.get("kind", "")).removesuffix("List")
    return {"apiVersion": collection.get("apiVersion"), "kind": kind, **item}


async def load_configuration(context: str | None = None) -> Any:
    """KUBECONFIG where it is set, else the pod's service account, else ~/.kube/config; raises ConfigException.

    A named context is read from the file.
    """
    configuration = kubernetes_client.Configuration()
    # Otherwise the client reads netrc and the environment before every request, in a thread.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.connection_pool_maxsize = 0  # watches keep theirs; the queue limits the requests
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG") and not context:
        kubernetes_config.load_incluster_config(  # type: ignore[no-untyped-call]
            client_configuration=configuration
        )
        return configuration  # no proxy: NO_PROXY has the cluster's addresses as networks, which Python does not read
    path = os.environ.get("KUBECONFIG")
    try:
        await kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, context=context, client_configuration=configuration
        )
    except KUBECONFIG_ERRORS as error:
        reason = " ".join(str(error).split())
        raise kubernetes_config.ConfigException(
            f"the kubeconfig {path or '~/.kube/config'} cannot be used, correct it ({reason})"
        ) from error
    configuration.proxy = configuration.proxy or _environment_proxy(configuration.host)
    return configuration


def _environment_proxy(url: str) -> str | None:
    """The proxy that HTTPS_PROXY or HTTP_PROXY names for a URL, unless NO_PROXY excepts its host."""
    parts = urlsplit(url)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)
