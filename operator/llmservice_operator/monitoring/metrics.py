"""The operator's own metrics, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from llmservice_operator.monitoring.process_metrics import ProcessMetrics


class OperatorMetrics:
    """Counts passes and decisions; labelled by service, and forgotten with it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["namespace", "name"]
        self._passes = Histogram(
            "llmservice_operator_pass_seconds",
            "Duration of one pass over a service.",
            registry=self.registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self._failures = Counter(
            "llmservice_operator_pass_failures_total",
            "Passes that ended in an error and will be repeated.",
            [*labels, "reason"],
            registry=self.registry,
        )
        self._desired = Gauge(
            "llmservice_operator_desired_replicas", "Replicas asked for.", labels, registry=self.registry
        )
        self._ready = Gauge(
            "llmservice_operator_ready_replicas", "Replicas that serve.", labels, registry=self.registry
        )
        self._condition = Gauge(
            "llmservice_operator_condition",
            "1 where the condition is True, 0 where it is False, -1 where it is Unknown.",
            [*labels, "type"],
            registry=self.registry,
        )

        self._ttft_target = Gauge(
            "llmservice_operator_ttft_target_seconds",
            "The promise spec.slo.ttftP99, for alerts to compare with.",
            labels,
            registry=self.registry,
        )
        self._prediction_error = Gauge(
            "llmservice_operator_prediction_error_percent",
            "Predicted KV blocks against measured ones; positive: predicted too many.",
            labels,
            registry=self.registry,
        )

        self._sizing_problem = Gauge(
            "llmservice_operator_sizing_problem",
            "1 where the spec can't be served, by the reason of SizingValid=False.",
            [*labels, "reason"],
            registry=self.registry,
        )
        self._decisions = Counter(
            "llmservice_operator_decisions_total",
            "Decisions of the autoscaler, one in every pass, by what they do and the steps that led to the number.",
            ["direction", "reason"],
            registry=self.registry,
        )
        self._overload = Histogram(
            "llmservice_operator_overload_to_ready_seconds",
            "From the moment at which the load asked for more replicas than serve until one more served.",
            registry=self.registry,
            buckets=(5, 10, 20, 30, 60, 90, 120, 180, 300, 600, 1200, 2400),
        )
        ProcessCollector(namespace="llmservice_operator", registry=self.registry)
        self.process = ProcessMetrics(self.registry)

    def passed(self, duration_s: float) -> None:
        self._passes.observe(duration_s)

    def failed(self, namespace: str, name: str, reason: str) -> None:
        self._failures.labels(namespace, name, reason).inc()

    def decided(self, before: int, replicas: int, reasons: Iterable[str]) -> None:
        direction = "up" if replicas > before else "down" if replicas < before else "hold"
        for reason in deciding(reasons, replicas):
            self._decisions.labels(direction, reason).inc()

    def relieved(self, seconds: float) -> None:
        """An overload lasted this long until one more pod served."""
        self._overload.observe(seconds)

    def sized(self, namespace: str, name: str, problem: str | None) -> None:
        self._sizing_problem.remove_by_labels({"namespace": namespace, "name": name})
        if problem is not None:
            self._sizing_problem.labels(namespace, name, problem).set(1)

    def observed(self, namespace: str, name: str, desired: int, ready: int, conditions: dict[str, str]) -> None:
        self._desired.labels(namespace, name).set(desired)
        self._ready.labels(namespace, name).set(ready)
        for kind, status in conditions.items():
            self._condition.labels(namespace, name, kind).set({"True": 1, "False": 0}.get(status, -1))

    def promised(self, namespace: str, name: str, ttft_target_s: float | None) -> None:
        _set(self._ttft_target, namespace, name, ttft_target_s)

    def predicted(self, namespace: str, name: str, error_percent: float | None) -> None:
        _set(self._prediction_error, namespace, name, error_percent)

    def forget(self, namespace: str, name: str) -> None:
        reported = (self._desired, self._ready, self._condition, self._ttft_target, self._prediction_error)
        for metric in (self._failures, self._sizing_problem, *reported):
            metric.remove_by_labels({"namespace": namespace, "name": name})

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


def deciding(reasons: Iterable[str], replicas: int) -> set[str]:
    """The names of the steps that arrived at this number: a reason reads `name: why -> number`."""
    found = {reason.partition(":")[0] for reason in reasons if reason.endswith(f"-> {replicas}")}
    return {name for name in found if name.isidentifier()} or {"other"}


def _set(gauge: Gauge, namespace: str, name: str, value: float | None) -> None:
    """A figure that there is none of has no series: an alert must not compare with a made-up one."""
    if value is None:
        gauge.remove_by_labels({"namespace": namespace, "name": name})
    else:
        gauge.labels(namespace, name).set(value)
