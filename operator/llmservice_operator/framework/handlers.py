"""Watch events: they are put into the cache, and the loop of the service that they concern is woken or ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kopf

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import FOLLOWED
from llmservice_operator.api.resource import KIND
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.loops import ServiceKey, ServiceLoops
from llmservice_operator.monitoring.metrics import ProcessMetrics


@dataclass(frozen=True, slots=True)
class Handlers:
    """Called in the event loop for each event; they do no I/O and never raise."""

    cache: ObjectCache
    loops: ServiceLoops
    forget: Callable[[str, str], None]
    """Called with the namespace and name of a service that is gone."""
    metrics: ProcessMetrics
    seen: dict[ServiceKey, tuple[str, int]] = field(default_factory=dict)
    """The uid and generation at which a loop was last woken."""

    def register(self, registry: kopf.OperatorRegistry) -> None:
        """One `on.event` handler for each kind. Daemons, timers and change handlers would add a finalizer."""
        for followed in FOLLOWED:
            kind = followed.kind
            selected = kopf.on.event(
                group=kind.group, version=kind.version, plural=kind.plural, id=kind.plural, registry=registry
            )
            selected(self._handler(kind.name))

    def take(self, kind: str, what: str | None, obj: Manifest) -> None:
        """Handle an event of this type; None for an object of a list."""
        if what is not None:
            self.metrics.watched(kind)
        news = self.cache.drop(kind, obj) if what == "DELETED" else self.cache.put(kind, obj)
        self.changed(kind, obj, news=news)

    def changed(self, kind: str, obj: Manifest, *, news: bool) -> None:
        """The cache has an object's state; `news` is False where it had that already, or a newer one."""
        if kind == KIND:
            self._service_changed((obj["metadata"]["namespace"], obj["metadata"]["name"]))
            return
        instance = (obj["metadata"].get("labels") or {}).get(labels.INSTANCE)
        if news and instance:
            self.loops.wake((obj["metadata"]["namespace"], instance))

    def _handler(self, kind: str) -> Callable[..., Any]:
        async def handle(event: dict[str, Any], **_: Any) -> None:
            self.take(kind, event["type"], event["object"])

        return handle

    def _service_changed(self, key: ServiceKey) -> None:
        service = self.cache.service(*key)
        if service is None:
            self.seen.pop(key, None)
            self.loops.end(key)
            self.forget(*key)
            return
        version = (service["metadata"]["uid"], service["metadata"].get("generation", 1))
        if self.seen.get(key) != version:  # writes of the status change neither
            self.seen[key] = version
            self.loops.start(key)
