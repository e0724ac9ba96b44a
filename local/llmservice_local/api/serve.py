"""The emulated Kubernetes API over HTTP, as far as controllers, the Python client and kubectl use it.

`async with serve_api() as api:` serves on a free loopback port; `api.url` is the server of a kubeconfig, `api.registry`
holds the objects. A CRD is installed by a POST, as on any cluster.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientError, ClientSession, ClientTimeout, web
from aiohttp.typedefs import Middleware

from llmservice_local.api import discovery, protobuf
from llmservice_local.api.access import ACCESS_REVIEWS, Account, AuditLog, Guard
from llmservice_local.api.eviction import evict
from llmservice_local.api.registry import APPLY_PATCH, DeleteOptions, Registry, Written, utc_now
from llmservice_local.api.request import (
    Target,
    delete_options,
    is_set,
    is_watch,
    parse_path,
    resource_version,
    write_options,
)
from llmservice_local.api.table import table
from llmservice_local.api.watch import WatchRequest, watch
from llmservice_local.api.webhooks import Webhooks
from llmservice_local.errors import ApiError, bad_request
from llmservice_local.kinds.catalogue import read_scale, scale_of
from llmservice_local.objects import Object
from llmservice_local.selector import Predicate, field_predicate, label_predicate

_SHOWN_WHEN_DELETED = frozenset({"PersistentVolumeClaim", "Pod", "ResourceQuota", "Service", "ServiceAccount"})
"""A delete returns the object for these kinds (ReturnDeletedObject upstream), a Status for the others."""

MAX_BODY_BYTES = 3 * 1024 * 1024  # etcd's own limit on a request is 1.5 MiB, the API server's 3 MiB
WATCH_TIMEOUT_S = 1800.0
_CREATED = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


@dataclass(frozen=True, slots=True)
class Api:
    """A served API."""

    url: str
    registry: Registry


@asynccontextmanager
async def serve_api(registry: Registry | None = None, port: int = 0, audit: Path | None = None) -> AsyncIterator[Api]:
    """Serve the emulated API on 127.0.0.1 until the block ends; port 0 selects a free one.

    `audit` is the file of the audit log.
    """
    registry = registry or Registry()
    with ExitStack() as stack:
        log = stack.enter_context(closing(AuditLog(audit))) if audit is not None else None
        async with (
            ClientSession(timeout=ClientTimeout(total=None, connect=5)) as session,
            _served(api_application(registry, session, audit=log), port) as bound,
        ):
            yield Api(f"http://127.0.0.1:{bound}", registry)


@asynccontextmanager
async def _served(application: web.Application, port: int) -> AsyncIterator[int]:
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        bound: int = runner.addresses[0][1]
        yield bound
    finally:
        await runner.cleanup()


def api_application(
    registry: Registry, session: ClientSession, middlewares: Sequence[Middleware] = (), audit: AuditLog | None = None
) -> web.Application:
    """The API as an aiohttp application; `session` is used to call nodes (logs) and webhooks."""
    handler = _Handler(registry, session, Guard(registry, audit))
    application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    application.router.add_route("*", "/{path:.*}", handler.handle)
    return application


class _Handler:
    def __init__(self, registry: Registry, session: ClientSession, guard: Guard) -> None:
        self._registry = registry
        self._session = session
        self._guard = guard
        self._webhooks = Webhooks(registry, session)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except ApiError as error:
            return _with_warnings(_json(error.status(), error.code), error.warnings)
        except web.HTTPRequestEntityTooLarge:
            message = f"the request is larger than {MAX_BODY_BYTES} bytes"
            return _json(ApiError(413, "RequestEntityTooLarge", message).status(), 413)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        account = self._guard.account(request)
        if (document := self._document(path, request)) is not None:
            return document
        if path == ACCESS_REVIEWS and request.method == "POST":
            return _json(self._guard.access_review(account, await _body(request)), 201)
        target = parse_path(self._registry.kinds, path)
        if account is not None:
            self._guard.admit(account, request, target)
        if target.subresource == "log":
            return await self._logs(request, target)
        if not target.name:
            return await self._collection(request, target, account)
        return await self._object(request, target, account)

    def _document(self, path: str, request: web.Request) -> web.Response | None:
        """Health, version, discovery and OpenAPI documents; None for other paths."""
        registry, kinds = self._registry, self._registry.kinds
        body: Object | None = None
        match path.strip("/").split("/"):
            case ["healthz" | "livez" | "readyz"]:
                return web.Response(text="ok")
            case ["version"]:
                body = discovery.VERSION
            case ["api"]:
                body = discovery.core_versions(request.host)
            case ["apis"]:
                body = discovery.groups(kinds)
            case ["api", version]:
                body = discovery.resources(kinds, "", version)
            case ["apis", group]:
                body = discovery.group(kinds, group)
            case ["apis", group, version]:
                body = discovery.resources(kinds, group, version)
            case ["openapi", "v3"]:
                body = discovery.openapi_index(kinds)
            case ["openapi", "v3", *root]:
                body = discovery.openapi_document(registry, "/".join(root))
        return None if body is None else _json(body)

    # -- collections ------------------------------------------------------------------------------------------------

    async def _collection(self, request: web.Request, target: Target, account: Account | None) -> web.StreamResponse:
        registry, kind = self._registry, target.kind
        if request.method == "GET":
            if is_watch(request.query):
                return await self._watch(request, target)
            labels, fields = _selectors(request.query)
            objects = registry.select(kind, target.namespace, labels, fields)
            return self._list_response(request, target, objects)
        if request.method == "POST":
            options = write_options(request.query, request.headers.get("User-Agent", ""))
            if kind.namespaced and target.namespace is None:
                raise _method_not_allowed()
            create = partial(registry.create, kind, target.namespace or "", await _body(request))
            return self._write_response(request, target, await self._webhooks.write(target, account, options, create))
        if request.method == "DELETE":
            labels, fields = _selectors(request.query)
            options_ = delete_options(request.query, await _optional_body(request))
            selected = registry.select(kind, target.namespace, labels, fields)
            warnings = await self._delete_all(target, account, selected, options_)
            return _with_warnings(self._list_response(request, target, selected), warnings)
        raise _method_not_allowed()

    async def _delete_all(
        self, target: Target, account: Account | None, selected: list[Object], options: DeleteOptions
    ) -> list[str]:
        warnings: list[str] = []
        for obj in selected:
            namespace, name = obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
            try:
                one = replace(target, namespace=namespace, name=name)
                warnings += (await self._webhooks.delete(one, account, options))[2]
            except ApiError:  # during a review, another request may have deleted the object
                if self._registry.store.get(target.kind.collection, namespace, name) is not None:
                    raise
        return warnings

    def _list_response(self, request: web.Request, target: Target, objects: list[Object]) -> web.Response:
        kind, revision = target.kind, str(self._registry.store.revision)
        if include := _table_wanted(request):
            printed = table(kind, objects, utc_now(), include)
            return _json({**printed, "metadata": {"resourceVersion": revision}})
        limit, page = request.query.get("limit", ""), objects
        if token := request.query.get("continue"):
            # The revision of the first page: a watch from there reports what has changed since then.
            revision, _, last = token.partition("/")
            if not revision.isdigit() or "/" not in last:
                raise bad_request(f"continue {token!r} is not valid: expected one that this server gave")
            page = [obj for obj in objects if _key(obj) > tuple(last.split("/", 1))]
        metadata: Object = {"resourceVersion": revision}
        if limit.isdigit() and int(limit) and len(page) > int(limit):
            metadata["remainingItemCount"] = len(page) - int(limit)
            page = page[: int(limit)]
            metadata["continue"] = "/".join((revision, *_key(page[-1])))
        return _json({"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": page})

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query, kind = request.query, target.kind
        labels, fields = _selectors(query)
        name = target.name
        timeout = query.get("timeoutSeconds", "")
        wanted = WatchRequest(
            kind,
            target.namespace,
            lambda obj: labels(obj) and fields(obj) and (not name or obj["metadata"]["name"] == name),
            resource_version(query),
            float(timeout) if timeout.isdigit() and int(timeout) else WATCH_TIMEOUT_S,
            is_set(query, "allowWatchBookmarks"),
            is_set(query, "sendInitialEvents"),
        )
        include = _table_wanted(request)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        try:
            async for event in watch(self._registry, wanted, loop.time):
                if include and event["type"] not in {"ERROR", "BOOKMARK"}:
                    event["object"] = table(kind, [event["object"]], utc_now(), include)
                await response.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        except ConnectionError:
            pass  # the client has disconnected
        return response

    # -- objects ----------------------------------------------------------------------------------------------------

    async def _object(self, request: web.Request, target: Target, account: Account | None) -> web.StreamResponse:
        match request.method:
            case "GET" if is_watch(request.query) and not target.subresource:
                return await self._watch(request, target)
            case "GET":
                obj = self._registry.get(target.kind, target.namespace or "", target.name)
                scaled = target.subresource == "scale"
                return _json(read_scale(target.kind, obj)) if scaled else self._object_response(request, target, obj)
            case "DELETE" if not target.subresource:
                return await self._delete(request, target, account)
            case "PUT" | "PATCH":
                return self._write_response(request, target, await self._write(request, target, account))
            case "POST":
                return _json(await self._post(request, target), 201)
        raise _method_not_allowed()

    async def _post(self, request: web.Request, target: Target) -> Object:
        """The subresources that are actions: binding, eviction, token."""
        match target.subresource:
            case "binding":
                self._registry.bind(target.namespace or "", target.name, await _body(request))
                return _CREATED
            case "eviction":
                evict(self._registry, target.namespace or "", target.name, await _body(request))
                return _CREATED
            case "token":
                return self._guard.token_request(target)
        raise _method_not_allowed()

    async def _write(self, request: web.Request, target: Target, account: Account | None) -> Written:
        registry, kind, namespace, subresource = self._registry, target.kind, target.namespace or "", target.subresource
        content_type, user_agent = request.content_type, request.headers.get("User-Agent", "")
        body = await _body(request)
        if request.method == "PATCH":
            options = write_options(request.query, user_agent, apply=content_type == APPLY_PATCH)
            verb = partial(registry.patch, kind, namespace, target.name, body, content_type, subresource=subresource)
            return await self._webhooks.write(target, account, options, verb)
        options = write_options(request.query, user_agent)
        if subresource == "finalize":
            return await self._webhooks.write(
                target, account, options, partial(registry.finalize, kind, target.name, body)
            )
        update = partial(registry.update, kind, namespace, target.name, body, subresource=subresource)
        return await self._webhooks.write(target, account, options, update)

    async def _delete(self, request: web.Request, target: Target, account: Account | None) -> web.Response:
        options = delete_options(request.query, await _optional_body(request))
        kind = target.kind
        obj, is_gone, warnings = await self._webhooks.delete(target, account, options)
        if not is_gone or (not kind.group and kind.name in _SHOWN_WHEN_DELETED):
            return _with_warnings(_json(obj), warnings)
        details = {"name": target.name, "group": kind.group, "kind": kind.plural, "uid": obj["metadata"]["uid"]}
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return _with_warnings(_json(status), warnings)

    def _object_response(self, request: web.Request, target: Target, obj: Object) -> web.Response:
        if include := _table_wanted(request):
            return _json(table(target.kind, [obj], utc_now(), include))
        return _json(obj)

    def _write_response(self, request: web.Request, target: Target, written: Written) -> web.Response:
        obj = written.obj
        if target.subresource == "scale":
            response = _json(scale_of(target.kind, obj))
        else:
            response = self._object_response(request, target, obj)
        response.set_status(201 if written.created else 200)
        return _with_warnings(response, written.warnings)

    async def _logs(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Forward a request for logs to the server of the pod's node."""
        if request.method != "GET":
            raise _method_not_allowed()
        pod = self._registry.get(target.kind, target.namespace or "", target.name)
        names = [container["name"] for container in pod["spec"]["containers"]]
        container = request.query.get("container") or names[0]
        known = names + [init["name"] for init in pod["spec"].get("initContainers") or []]
        if container not in known:
            raise bad_request(f"container {container} is not valid for pod {target.name}: it has {', '.join(known)}")
        if len(names) > 1 and "container" not in request.query:
            raise bad_request(f"a container name must be specified for pod {target.name}, choose one of: {known}")
        url = self._node_url(pod) + f"/containerLogs/{target.namespace}/{target.name}/{container}"
        query = {name: value for name, value in request.query.items() if name != "container"}
        try:
            async with self._session.get(url, params=query) as upstream:
                if upstream.status >= 400:
                    raise ApiError(upstream.status, "BadRequest", await upstream.text())
                response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                return response
        except ClientError as error:
            raise ApiError(500, "InternalError", f"the node of pod {target.name} does not respond: {error}") from error

    def _node_url(self, pod: Object) -> str:
        name = pod["spec"].get("nodeName")
        if not name:
            raise bad_request(f"pod {pod['metadata']['name']} does not have a host assigned")
        node = self._registry.get(self._registry.kinds.find("", "v1", "nodes"), "", name)
        address = next(entry["address"] for entry in node["status"]["addresses"] if entry["type"] == "InternalIP")
        port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        return f"http://{address}:{port}"


def _key(obj: Object) -> tuple[str, str]:
    """The key by which collections are sorted."""
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _selectors(query: Mapping[str, str]) -> tuple[Predicate, Predicate]:
    return label_predicate(query.get("labelSelector", "")), field_predicate(query.get("fieldSelector", ""))


def _table_wanted(request: web.Request) -> str:
    """The `includeObject` parameter if the client accepts a table, else ''."""
    accepted = request.headers.get("Accept", "").split(",")[0]
    return request.query.get("includeObject", "Metadata") if "as=Table" in accepted else ""


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    if request.content_type == protobuf.CONTENT_TYPE:
        return protobuf.decode(raw)
    try:
        try:
            return json.loads(raw)
        except ValueError:
            if "yaml" not in request.content_type:
                raise
            return yaml.safe_load(raw)  # most clients send JSON, which is YAML
    except (ValueError, yaml.YAMLError) as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from error


async def _optional_body(request: web.Request) -> Object:
    body = await _body(request) if request.can_read_body else {}
    return body if isinstance(body, dict) else {}


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=json.dumps(body, separators=(",", ":")).encode(), status=status, content_type="application/json"
    )


def _with_warnings(response: web.Response, warnings: Iterable[str]) -> web.Response:
    for warning in dict.fromkeys(warnings):
        response.headers.add("Warning", f"299 - {json.dumps(warning, ensure_ascii=False)}")
    return response


def _method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
