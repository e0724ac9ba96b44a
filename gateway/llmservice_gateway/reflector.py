"""A cache of one kind of object, kept current by list and watch.

The cache outlives the connection: while the API server is unreachable the last known state is used, since a pod's
address is more often still right than wrong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

import aiohttp
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.client import ApiException
from kubernetes.aio.watch import Watch

logger = logging.getLogger(__name__)

LIST_TIMEOUT_S = 30
WATCH_GRACE_S = 30
WATCH_S = 240
"""The server ends a watch after this time."""
CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 70.0
"""A connection is given up that brings nothing for so long: a watch has a bookmark every minute."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0

Object = dict[str, Any]
T = TypeVar("T")
# What the client raises, beside ConfigException, for a file that cannot be read or is no kubeconfig.
_KUBECONFIG_ERRORS = (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError)


class KubernetesAPI:
    """One connection pool to the API server. Objects are the dicts that it returns: the official client's models refuse
    unknown fields.
    """

    def __init__(self, configuration: client.Configuration) -> None:
        self._client = client.ApiClient(configuration)

    @classmethod
    async def connect(cls) -> KubernetesAPI:
        """Load the credentials: KUBECONFIG, else the service account of the pod, else ~/.kube/config.

        Raises:
            kubernetes.aio.config.ConfigException: there are none, or they cannot be used.
        """
        configuration = client.Configuration()
        configuration.connection_pool_maxsize = 0  # every watch keeps one: two for each namespace
        kubeconfig = os.environ.get("KUBECONFIG")
        if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            # No proxy: NO_PROXY has the cluster's addresses as networks, which aiohttp does not read.
            configuration.client_session_kwargs = {"trust_env": False}
        else:
            try:
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=kubeconfig, client_configuration=configuration
                )
            except _KUBECONFIG_ERRORS as error:
                reason = " ".join(str(error).split())
                raise config.ConfigException(
                    f"the kubeconfig {kubeconfig or '~/.kube/config'} cannot be used, correct it ({reason})"
                ) from error
        # Each Watch creates a client; without this default it would load the system's CAs, which takes 35 ms.
        client.Configuration.set_default(configuration)
        return cls(configuration)

    async def __aenter__(self) -> KubernetesAPI:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, path: str, query: dict[str, str], timeout_s: float) -> Any:
        """The response to a GET, with an unread body.

        Raises:
            kubernetes.aio.client.ApiException: its status is not 200; the reason is the API server's.
        """
        request = await self._client.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_S)
        answer = await self._client.call_api(*request, _request_timeout=timeout)
        if answer.status != 200:
            reason = (await answer.response.read()).decode(errors="replace")[:500]
            raise client.ApiException(status=answer.status, reason=reason)
        return answer.response


class Reflector(Generic[T]):
    """Keeps `objects` in sync with the API's collection at `path` (and `selector`), and calls `on_change`.

    Of each object only what `parse` returns is kept (None: nothing), and a change of the rest is none.
    """

    def __init__(
        self,
        api: KubernetesAPI,
        path: str,
        parse: Callable[[Object], T | None],
        on_change: Callable[[], None],
        selector: str = "",
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._path = path
        self._parse = parse
        self._on_change = on_change
        self._query = {"labelSelector": selector} if selector else {}
        self._sleep = sleep
        self._objects: dict[tuple[str, str], T] = {}
        self._watch = Watch()  # type: ignore[no-untyped-call]  # holds the version that the next watch continues from
        self.synced = asyncio.Event()
        """Set once the first list has arrived."""
        self.is_refused = False
        """Whether the API server has refused the collection since it was last listed."""

    def objects(self) -> Iterable[T]:
        return self._objects.values()

    async def run(self) -> None:
        """List, then watch, for ever, with exponential backoff and jitter after a failure."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if not self._watch.resource_version:
                    await self._list()
                await self._follow()
                backoff_s = FIRST_BACKOFF_S
            except ApiException as error:
                # 410 Gone: too old to continue from. After any other refusal: start over
                self._watch.resource_version = None
                if error.status == 410:
                    continue
                self.is_refused |= error.status == 403
                answer = f"the API server answered {error.status}: {error.reason}"
                logger.warning("cannot read %s: %s; keeping what is known", self._path, answer)
            except aiohttp.SocketTimeoutError:  # also of an API server that sends no bookmarks while nothing happens
                backoff_s = FIRST_BACKOFF_S
                logger.info("%s was silent for %g s, is watched anew", self._path, SILENCE_S)
                continue
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                logger.warning("lost %s: %s: %s; keeping what is known", self._path, type(error).__name__, error)
            else:
                continue
            await self._sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311  # jitter, not a secret
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    async def _list(self) -> None:
        response = await self._api.get(self._path, self._query, LIST_TIMEOUT_S)
        answer = json.loads(await response.read())
        parsed = ((_key(item), self._parse(item)) for item in answer["items"])
        self._objects = {key: kept for key, kept in parsed if kept is not None}
        self._watch.resource_version = answer["metadata"]["resourceVersion"]
        self.is_refused = False
        self.synced.set()
        self._on_change()

    async def _follow(self) -> None:
        query = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(self._watch.resource_version),
            "timeoutSeconds": str(WATCH_S),
        }

        async def connect(**_: Any) -> Any:  # it declares no model, so that Watch leaves each object a dict
            return await self._api.get(self._path, query, WATCH_S + WATCH_GRACE_S)

        # With a timeout, Watch ends with the response; without one it reconnects by itself.
        events = self._watch.stream(connect, timeout_seconds=WATCH_S)  # type: ignore[no-untyped-call]
        try:
            async with self._watch:
                async for event in events:
                    if isinstance(event, str):  # Watch returns a line that is not JSON unparsed
                        raise aiohttp.ClientPayloadError(f"expected an event, got the line {event[:100]!r}")
                    self._take(event["type"], event["object"])
        except KeyError as error:  # Watch requires `code`, `reason` and `message` of every ERROR event
            raise ApiException(status=500, reason=f"an event without {error}") from error

    def _take(self, kind: str, item: Object) -> None:
        if kind == "BOOKMARK":
            return
        key, kept = _key(item), None if kind == "DELETED" else self._parse(item)
        if kept == self._objects.get(key):
            return
        if kept is None:
            del self._objects[key]
        else:
            self._objects[key] = kept
        self._on_change()


def _key(item: Object) -> tuple[str, str]:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
