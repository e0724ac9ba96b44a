"""What one operator process tells of itself: its requests, its watches, its turn."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sized
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from llmservice_operator.api.kinds import FOLLOWED

_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/[^/]+)?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[a-z]+))?$"
)
_VERBS = {"WATCH": "watch", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ProcessMetrics:
    """Names of verbs and resources are those of Kubernetes, and as many as there are kinds."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests = Counter(
            "llmservice_operator_api_requests_total",
            "Requests to the API server by the code of the answer; code 0: there was none.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "llmservice_operator_api_request_seconds",
            "Time to the API server's whole answer; of a watch, to its beginning.",
            ["verb", "resource"],
            registry=registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self._leader = Gauge(
            "llmservice_operator_leader", "1 while this process may write, 0 while it stands by.", registry=registry
        )
        self._loops = Gauge("llmservice_operator_loops", "Services that are worked on.", registry=registry)
        self._cached = Gauge("llmservice_operator_cached_objects", "Objects in the cache.", registry=registry)
        self._events = Counter(
            "llmservice_operator_watch_events_total",
            "Events that watches brought, bookmarks apart.",
            ["kind"],
            registry=registry,
        )
        self._age = Gauge(
            "llmservice_operator_watch_event_age_seconds",
            "Since the last event of a kind. Without changes in the cluster it grows: compare with resync_differences.",
            ["kind"],
            registry=registry,
        )
        self._relists = Counter(
            "llmservice_operator_watch_relists_total",
            "Watches that began anew with a list, the first time included.",
            ["kind"],
            registry=registry,
        )
        self._failing = Gauge(
            "llmservice_operator_watch_failing",
            "1 while the API server refuses the list or watch of a kind or can't be reached for it; /healthz says why.",
            ["resource"],
            registry=registry,
        )
        self._resyncs = Counter(
            "llmservice_operator_resyncs_total",
            "Lists beside the watches', of everything or of what was listed anew.",
            ["result"],
            registry=registry,
        )
        self._differences = Counter(
            "llmservice_operator_resync_differences_total",
            "Objects that a resync found otherwise than the cache held them: what watches missed.",
            registry=registry,
        )
        for followed in FOLLOWED:
            self._failing.labels(followed.kind.plural)
        self._left_s: Callable[[], float] = lambda: 0.0
        self._seen_s = {followed.kind.name: clock() for followed in FOLLOWED}
        for kind in self._seen_s:
            self._age.labels(kind).set_function(partial(self._age_of, kind))

    def _age_of(self, kind: str) -> float:
        return self._clock() - self._seen_s[kind]

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """A request to the API server ended; `status` is 0 where there was no answer."""
        verb, resource = call_of(method, path)
        self._requests.labels(verb, resource, str(status)).inc()
        self._seconds.labels(verb, resource).observe(seconds)

    def lead(self, left_s: Callable[[], float]) -> None:
        """The gauge asks the fence itself, so that it falls when the fence does."""
        self._left_s = left_s
        self._leader.set_function(lambda: float(self.leads()))

    def leads(self) -> bool:
        """Whether this process may write."""
        return self._left_s() > 0

    def hold(self, loops: Sized, cache: Sized) -> None:
        self._loops.set_function(lambda: len(loops))
        self._cached.set_function(lambda: len(cache))

    def watched(self, kind: str) -> None:
        """A watch brought an event."""
        self._events.labels(kind).inc()
        self._seen_s[kind] = self._clock()

    def relisted(self, kind: str) -> None:
        """A watch begins, or begins anew, with a list."""
        self._relists.labels(kind).inc()

    def watch_failing(self, plural: str, *, failing: bool) -> None:
        self._failing.labels(plural).set(failing)

    def resynced(self, differences: int) -> None:
        self._resyncs.labels("ok").inc()
        self._differences.inc(differences)

    def resync_failed(self) -> None:
        self._resyncs.labels("error").inc()


def call_of(method: str, path: str) -> tuple[str, str]:
    """Verb and resource of a request, as in a role's rules; ("get", "discovery") for what is no resource."""
    match = _PATH.match(path)
    if match is None:
        return _VERBS.get(method, "get"), "discovery"
    plural = match["plural"]
    resource = f"{plural}/{match['subresource']}" if match["subresource"] else plural
    verb = ("get" if match["name"] else "list") if method == "GET" else _VERBS.get(method, "other")
    return verb, resource
