"""kopf's part: watch services and their children, and wake the loop of the service that something happened to.

Only event handlers are used: they write nothing to the objects, so that there is no finalizer that a deletion would
wait for while no operator runs. The API server's garbage collector removes the children by their owner references.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

import kopf

from llmservice_operator import labels
from llmservice_operator.applier import Applier
from llmservice_operator.child import ChildKind
from llmservice_operator.login import login
from llmservice_operator.loops import ServiceKey, ServiceLoops
from llmservice_operator.resource import GROUP, MANAGER, PLURAL, VERSION

POD = ChildKind("v1", "Pod", "pods")
_REQUEST_TIMEOUT_S = 10.0
_WATCH_S = 300
_BACKOFFS_S = (1.0, 1.0, 2.0, 3.0, 5.0)
_LONGEST_BACKOFF_S = 10.0


class _EndlessBackoffs:
    """Pauses between attempts, without a last one: an API server that is down must not end the operator."""

    def __iter__(self) -> Iterator[float]:
        return chain(_BACKOFFS_S, repeat(_LONGEST_BACKOFF_S))


def handlers(
    loops: ServiceLoops, applier: Applier, stop: asyncio.Event, kinds: Iterable[ChildKind]
) -> kopf.OperatorRegistry:
    """A registry of its own, so that two operators in one process never mix; `kinds` are the children's."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(login)
    seen: dict[ServiceKey, tuple[str, int]] = {}

    @kopf.on.event(group=GROUP, version=VERSION, plural=PLURAL, registry=registry)
    async def service_changed(type: str | None, meta: Mapping[str, Any], **_: Any) -> None:  # noqa: A002 - kopf's name
        key = (meta["namespace"], meta["name"])
        if type == "DELETED":
            seen.pop(key, None)
            await loops.stop(key)
            return
        version = (meta["uid"], meta.get("generation", 1))
        if seen.get(key) != version:  # our own writes to the status change neither
            seen[key] = version
            loops.start(key)

    async def child_changed(*, meta: Mapping[str, Any], param: Any = None, **_: Any) -> None:
        instance = (meta.get("labels") or {}).get(labels.INSTANCE)
        if instance:
            applier.touched((param, meta["namespace"], meta["name"]))
            loops.wake((meta["namespace"], instance))

    for kind in (POD, *kinds):
        kopf.on.event(
            group=kind.group,
            version="v1",
            plural=kind.plural,
            id=f"{kind.plural}-changed",
            param=kind.name,
            labels={labels.MANAGED_BY: MANAGER},
            registry=registry,
        )(child_changed)

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        stop.set()  # kopf took the signal itself; what still waits for the flag would hold up the exit
        await loops.stop_all()

    return registry


def kopf_settings(kinds: Iterable[ChildKind]) -> kopf.OperatorSettings:
    """Bounded requests, no scans of the whole cluster, children filtered by the API server."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = _REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = _REQUEST_TIMEOUT_S
    settings.networking.error_backoffs = _EndlessBackoffs()
    settings.watching.server_timeout = _WATCH_S
    settings.watching.client_timeout = _WATCH_S + 30
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    for kind in (POD, *kinds):
        settings.watching.label_selectors[kind.api_version, kind.plural] = f"{labels.MANAGED_BY}={MANAGER}"
    return settings
