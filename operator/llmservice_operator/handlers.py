"""kopf's part: watch services and their children, keep the cache current, wake the loop of the service concerned.

Only event handlers are used: they write nothing to the objects, so that there is no finalizer that a deletion would
wait for while no operator runs. The API server's garbage collector removes the children by their owner references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, cast

import kopf

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import Followed
from llmservice_operator.api.resource import GROUP, KIND
from llmservice_operator.cluster.kube_client import PAGE
from llmservice_operator.cluster.login import login
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.loops import ServiceKey, ServiceLoops
from llmservice_operator.monitoring.process_metrics import ProcessMetrics

_REQUEST_TIMEOUT_S = 10.0
_WATCH_S = 300
_BACKOFFS_S = (1.0, 1.0, 2.0, 3.0, 5.0)
_LONGEST_BACKOFF_S = 10.0
_WORKER_IDLE_S = 0.2
"""kopf's workers, one for every object, keep its last state until they end: after a list, all of it at once."""


class _EndlessBackoffs:
    """Pauses between attempts, without a last one: an API server that is down must not end the operator."""

    def __iter__(self) -> Iterator[float]:
        return chain(_BACKOFFS_S, repeat(_LONGEST_BACKOFF_S))


class _NoDiffBase(kopf.DiffBaseStorage):
    """Nobody asks kopf what changed: by default it copies every object, at every event, to be able to tell."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return cast("kopf.BodyEssence", {})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is written to any object."""


@dataclass(frozen=True, slots=True)
class Watches:
    """What an event means to the operator: the cache is brought up to date, and the service concerned looked at."""

    cache: ObjectCache
    loops: ServiceLoops
    forget: Callable[[str, str], None]
    """Told of a service that is gone."""
    relisted: Callable[[], None]
    """Told when a watch begins anew."""
    metrics: ProcessMetrics
    seen: dict[ServiceKey, tuple[str, int]] = field(default_factory=dict)
    """The uid and generation at which a loop was last woken."""

    def service_changed(self, kind: str | None, obj: Mapping[str, Any]) -> None:
        """`kind` is the event's: ADDED, MODIFIED, DELETED, or None for what a watch lists as it begins."""
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        if kind == "DELETED":
            if self.cache.drop(KIND, obj):
                self._gone(key)
            return
        self.cache.put(KIND, obj)
        version = (obj["metadata"]["uid"], obj["metadata"].get("generation", 1))
        if self.seen.get(key) != version:  # our own writes to the status change neither
            self.seen[key] = version
            self.loops.start(key)

    def child_changed(self, kind: str | None, child: str, obj: Mapping[str, Any]) -> None:
        metadata = obj["metadata"]
        news = self.cache.drop(child, obj) if kind == "DELETED" else self.cache.put(child, obj)
        instance = (metadata.get("labels") or {}).get(labels.INSTANCE)
        if news and instance:
            self.loops.wake((metadata["namespace"], instance))

    def resynced(self, followed: Followed, obj: Mapping[str, Any]) -> None:
        """A resync found what no watch told of: the cache has it by now, its service must be looked at."""
        metadata = obj["metadata"]
        if followed.kind.name != KIND:
            if instance := (metadata.get("labels") or {}).get(labels.INSTANCE):
                self.loops.wake((metadata["namespace"], instance))
            return
        key = (metadata["namespace"], metadata["name"])
        if self.cache.service(*key) is None:
            self._gone(key)
        else:
            self.loops.start(key)

    def _gone(self, key: ServiceKey) -> None:
        self.seen.pop(key, None)
        self.loops.end(key)
        self.forget(*key)


def handlers(watches: Watches, kinds: Iterable[Followed]) -> kopf.OperatorRegistry:
    """A registry of its own, so that two operators in one process never mix; `kinds` are those that are served."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(login)

    async def changed(*, event: Mapping[str, Any], param: Any = None, **_: Any) -> None:
        kind, obj = event["type"], event["object"]
        watches.metrics.watched(param, listed=kind is None)
        if kind is None:
            watches.relisted()
        if param == KIND:
            watches.service_changed(kind, obj)
        else:
            watches.child_changed(kind, param, obj)

    for followed in kinds:
        kopf.on.event(
            group=followed.kind.group,
            version=followed.kind.version,
            plural=followed.kind.plural,
            id=f"{followed.kind.plural}-changed",
            param=followed.kind.name,
            registry=registry,
        )(changed)

    return registry


def kopf_settings(kinds: Iterable[Followed], silence_s: float) -> kopf.OperatorSettings:
    """Bounded requests, no scans of the whole cluster, children filtered by the API server.

    A watch that brings nothing for `silence_s`, not even the bookmark that is due every minute, is begun anew where it
    broke off: its connection may have died without a word.
    """
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = _REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = _REQUEST_TIMEOUT_S
    settings.networking.error_backoffs = _EndlessBackoffs()
    settings.watching.inactivity_timeout = silence_s
    settings.watching.chunk_size = PAGE
    settings.watching.server_timeout = _WATCH_S
    settings.watching.client_timeout = _WATCH_S + 30
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.queueing.idle_timeout = _WORKER_IDLE_S
    for followed in kinds:
        if followed.selector:
            settings.watching.label_selectors[followed.kind.api_version, followed.kind.plural] = followed.selector
    return settings
