"""The operator's own metrics: of its passes and services, and of the process itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from llmservice_operator.api.kinds import FOLLOWED
from llmservice_planner.sizing.prediction_error import Quantity

_PREFIX = "llmservice_operator_"
_SERVICE = ("namespace", "name")

Declared = Mapping[str, tuple[str, tuple[str, ...]]]
"""Help text and labels by name."""

_SERVICE_GAUGES: Declared = {
    "desired_replicas": ("Replicas asked for.", _SERVICE),
    "ready_replicas": ("Replicas that serve.", _SERVICE),
    "condition": (
        "1 where the condition is True, 0 where it is False, -1 where it is Unknown.",
        (*_SERVICE, "type"),
    ),
    "ttft_target_seconds": ("The target spec.slo.ttftP99, for alerts to compare with.", _SERVICE),
    "prediction_error_percent": (
        "Predicted KV blocks against measured ones; positive: predicted too many.",
        _SERVICE,
    ),
    "prediction_error_ratio": (
        "Predicted by measured, less 1: of KV blocks, steps that decode (itl) or compute prompts (ttft), startup.",
        (*_SERVICE, "quantity"),
    ),
    "demand_tokens_per_second": ("Prompt tokens to compute and output tokens that arrive, over the window.", _SERVICE),
    "replica_tokens_per_second": ("What one replica serves of what arrives, used to the full.", _SERVICE),
    "load_replicas": ("The demand in replicas that would be busy all the time.", _SERVICE),
    "predicted_load_replicas": ("The same by the time that a replica asked for now serves.", _SERVICE),
    "sizing_problem": (
        "1 where the spec can't be served, by the reason of SizingValid=False.",
        (*_SERVICE, "reason"),
    ),
}
_PASS_COUNTERS: Declared = {
    "pass_failures_total": ("Passes that ended in an error and will be repeated.", (*_SERVICE, "reason")),
    "wake_ups_total": ("Services that were scaled up from zero because requests waited in gateways.", _SERVICE),
    "held_reads_total": (
        "Reads of the requests that a gateway holds, while any service is at zero, by result: ok or error.",
        ("result",),
    ),
    "decisions_total": (
        "Decisions of the autoscaler, one in every pass, by what they do and the steps that led to the number.",
        ("direction", "reason"),
    ),
}
_PROCESS_GAUGES: Declared = {
    "leader": ("1 while this process may write, 0 while it stands by.", ()),
    "loops": ("Services that are worked on.", ()),
    "cached_objects": ("Objects in the cache.", ()),
    "watch_event_age_seconds": (
        "Since the last event of a kind. Without changes in the cluster it grows: compare with resync_differences.",
        ("kind",),
    ),
    "watch_failing": (
        "1 while the API server refuses the list or watch of a kind or can't be reached for it; /healthz says why.",
        ("resource",),
    ),
}
_PROCESS_COUNTERS: Declared = {
    "api_requests_total": (
        "Requests to the API server by the code of the answer; code 0: there was none.",
        ("verb", "resource", "code"),
    ),
    "watch_events_total": ("Events that watches brought, bookmarks apart.", ("kind",)),
    "watch_relists_total": ("Watches that began anew with a list, the first time included.", ("kind",)),
    "resyncs_total": ("Lists beside the watches', of everything or of what was listed anew.", ("result",)),
    "resync_differences_total": (
        "Objects that a resync found otherwise than the cache held them: what watches missed.",
        (),
    ),
}
_PASS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OVERLOAD_BUCKETS = (5, 10, 20, 30, 60, 90, 120, 180, 300, 600, 1200, 2400)
_REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def _gauges(declared: Declared, registry: CollectorRegistry) -> dict[str, Gauge]:
    return {name: Gauge(_PREFIX + name, text, labels, registry=registry) for name, (text, labels) in declared.items()}


def _counters(declared: Declared, registry: CollectorRegistry) -> dict[str, Counter]:
    return {name: Counter(_PREFIX + name, text, labels, registry=registry) for name, (text, labels) in declared.items()}


class OperatorMetrics:
    """Counts passes and decisions; series of a service are removed with it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = _gauges(_SERVICE_GAUGES, self.registry)
        self._counters = _counters(_PASS_COUNTERS, self.registry)
        self._conditions: dict[tuple[str, str], frozenset[str]] = {}
        """The types that have a series, by service: a scrape may come at any time, so others are set, not made anew."""
        self._passes = Histogram(
            f"{_PREFIX}pass_seconds",
            "Duration of one pass over a service.",
            registry=self.registry,
            buckets=_PASS_BUCKETS,
        )
        self._overload = Histogram(
            f"{_PREFIX}overload_to_ready_seconds",
            "From the moment at which the load asked for more replicas than serve until one more served.",
            registry=self.registry,
            buckets=_OVERLOAD_BUCKETS,
        )
        self._cold_start = Histogram(
            f"{_PREFIX}cold_start_seconds",
            "From the first request to a service at zero until a pod was ready (total), and what it was spent on.",
            ["phase"],
            registry=self.registry,
            buckets=_OVERLOAD_BUCKETS,
        )
        ProcessCollector(namespace="llmservice_operator", registry=self.registry)
        self.process = ProcessMetrics(self.registry)

    def passed(self, duration_s: float) -> None:
        self._passes.observe(duration_s)

    def failed(self, namespace: str, name: str, reason: str) -> None:
        self._counters["pass_failures_total"].labels(namespace, name, reason).inc()

    def decided(self, before: int, replicas: int, reasons: Iterable[str]) -> None:
        direction = "up" if replicas > before else "down" if replicas < before else "hold"
        for reason in deciding(reasons, replicas):
            self._counters["decisions_total"].labels(direction, reason).inc()

    def woke_up(self, namespace: str, name: str) -> None:
        self._counters["wake_ups_total"].labels(namespace, name).inc()

    def started_cold(self, phases: Mapping[str, float]) -> None:
        for phase, seconds in phases.items():
            self._cold_start.labels(phase).observe(seconds)

    def held_read(self, result: str) -> None:
        self._counters["held_reads_total"].labels(result).inc()

    def overload_ended(self, lasted_s: float) -> None:
        """One more pod serves, this long after the overload began."""
        self._overload.observe(lasted_s)

    def sized(self, namespace: str, name: str, problem: str | None) -> None:
        gauge = self._gauges["sizing_problem"]
        gauge.remove_by_labels({"namespace": namespace, "name": name})
        if problem is not None:
            gauge.labels(namespace, name, problem).set(1)

    def predicted(self, namespace: str, name: str, errors: Mapping[str, float]) -> None:
        """By quantity; those that are not known any more have no series."""
        gauge = self._gauges["prediction_error_ratio"]
        for quantity in get_args(Quantity):  # `remove_by_labels` would read the labels of all services in every pass
            if quantity in errors:
                gauge.labels(namespace, name, quantity).set(errors[quantity])
            else:
                gauge.remove(namespace, name, quantity)

    def reported(
        self, namespace: str, name: str, conditions: Mapping[str, str], figures: Mapping[str, float | None]
    ) -> None:
        """What the status says: conditions by type, and figures by the gauge's name.

        A figure that is None has no series, so that no alert compares with a made-up one; neither has a condition that
        the status has no more.
        """
        for kind in self._conditions.get((namespace, name), frozenset()) - conditions.keys():
            self._gauges["condition"].remove(namespace, name, kind)
        self._conditions[namespace, name] = frozenset(conditions)
        for kind, status in conditions.items():
            self._gauges["condition"].labels(namespace, name, kind).set({"True": 1, "False": 0}.get(status, -1))
        for figure, value in figures.items():
            if value is None:
                self._gauges[figure].remove(namespace, name)
            else:
                self._gauges[figure].labels(namespace, name).set(value)

    def forget(self, namespace: str, name: str) -> None:
        self._conditions.pop((namespace, name), None)
        counters = (self._counters["pass_failures_total"], self._counters["wake_ups_total"])
        for metric in (*counters, *self._gauges.values()):
            metric.remove_by_labels({"namespace": namespace, "name": name})

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


def deciding(reasons: Iterable[str], replicas: int) -> set[str]:
    """The names of the steps that arrived at this number: a reason reads `name: why -> number`."""
    found = {reason.partition(":")[0] for reason in reasons if reason.endswith(f"-> {replicas}")}
    return {name for name in found if name.isidentifier()} or {"other"}


class ProcessMetrics:
    """Requests to the API server, watches and leadership of one process.

    Verbs and resources are named as in Kubernetes' roles; there are as many as there are kinds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gauges = _gauges(_PROCESS_GAUGES, registry)
        self._counters = _counters(_PROCESS_COUNTERS, registry)
        self._seconds = Histogram(
            f"{_PREFIX}api_request_seconds",
            "Time to the API server's whole answer; of a watch, to its beginning.",
            ["verb", "resource"],
            registry=registry,
            buckets=_REQUEST_BUCKETS,
        )
        self._left_s: Callable[[], float] = lambda: 0.0
        self._last_event_s = {followed.kind.name: clock() for followed in FOLLOWED}
        for followed in FOLLOWED:
            self._gauges["watch_failing"].labels(followed.kind.plural)
            age = self._gauges["watch_event_age_seconds"].labels(followed.kind.name)
            age.set_function(partial(self._age_of, followed.kind.name))

    def _age_of(self, kind: str) -> float:
        return self._clock() - self._last_event_s[kind]

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """A request to the API server ended; `status` is 0 where there was no answer."""
        verb, resource = call_of(method, path)
        self._counters["api_requests_total"].labels(verb, resource, str(status)).inc()
        self._seconds.labels(verb, resource).observe(seconds)

    def lead(self, left_s: Callable[[], float]) -> None:
        """`left_s` is for how long this process may write; the gauge calls it at each scrape."""
        self._left_s = left_s
        self._gauges["leader"].set_function(lambda: float(self.leads()))

    def leads(self) -> bool:
        """Whether this process may write."""
        return self._left_s() > 0

    def track(self, loops: Sized, cache: Sized) -> None:
        self._gauges["loops"].set_function(lambda: len(loops))
        self._gauges["cached_objects"].set_function(lambda: len(cache))

    def watched(self, kind: str) -> None:
        """A watch brought an event."""
        self._counters["watch_events_total"].labels(kind).inc()
        self._last_event_s[kind] = self._clock()

    def relisted(self, kind: str) -> None:
        """A watch begins, or begins anew, with a list."""
        self._counters["watch_relists_total"].labels(kind).inc()

    def watch_failing(self, plural: str, *, failing: bool) -> None:
        self._gauges["watch_failing"].labels(plural).set(failing)

    def resynced(self, differences: int) -> None:
        self._counters["resyncs_total"].labels("ok").inc()
        self._counters["resync_differences_total"].inc(differences)

    def resync_failed(self) -> None:
        self._counters["resyncs_total"].labels("error").inc()


_VERBS = {"WATCH": "watch", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/[^/]+)?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[a-z]+))?$"
)


def call_of(method: str, path: str) -> tuple[str, str]:
    """Verb and resource of a request, as in a role's rules; ("get", "discovery") for anything but a resource."""
    match = _PATH.match(path)
    if match is None:
        return _VERBS.get(method, "get"), "discovery"
    plural = match["plural"]
    resource = f"{plural}/{match['subresource']}" if match["subresource"] else plural
    verb = ("get" if match["name"] else "list") if method == "GET" else _VERBS.get(method, "other")
    return verb, resource
