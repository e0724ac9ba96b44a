"""What a change in the cluster means to the operator: which service is to be looked at, and which is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmservice_operator.api import labels
from llmservice_operator.api.resource import KIND
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.loops import ServiceKey, ServiceLoops


@dataclass(frozen=True, slots=True)
class Wakeups:
    """Told of every change, once it is in the cache."""

    cache: ObjectCache
    loops: ServiceLoops
    forget: Callable[[str, str], None]
    """Told of a service that is gone."""
    seen: dict[ServiceKey, tuple[str, int]] = field(default_factory=dict)
    """The uid and generation at which a loop was last woken."""

    def changed(self, kind: str, obj: Manifest, *, news: bool) -> None:
        """`news` is False for what the cache knew already, as from the answer to a write of ours."""
        if kind == KIND:
            self._service_changed((obj["metadata"]["namespace"], obj["metadata"]["name"]))
            return
        instance = (obj["metadata"].get("labels") or {}).get(labels.INSTANCE)
        if news and instance:
            self.loops.wake((obj["metadata"]["namespace"], instance))

    def _service_changed(self, key: ServiceKey) -> None:
        service = self.cache.service(*key)
        if service is None:
            self.seen.pop(key, None)
            self.loops.end(key)
            self.forget(*key)
            return
        version = (service["metadata"]["uid"], service["metadata"].get("generation", 1))
        if self.seen.get(key) != version:  # our own writes to the status change neither
            self.seen[key] = version
            self.loops.start(key)
