"""The alerts, as data: one source for the chart, for a plain Prometheus and for the PrometheusRule of a single service.

The series must carry the labels that ours get from a PodMonitor or ServiceMonitor of this project: servers `namespace`,
`pod` and `service` (the LLMService's name), the operator's own `namespace` and `name` (`honorLabels`).
An alert about a service has the same name and labels in all three, so that an Alertmanager deduplicates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmservice_operator.api.spec import Manifest
from llmservice_operator.monitoring import promql

RUNBOOK = "docs/runbook.md"
KV_SATURATED = 0.95
"""Share of the KV blocks held, beyond which nearly every admission preempts a request."""
PREDICTION_ERROR_PERCENT = 10
MOST_ERROR_RATIO = 0.25
PREEMPTIONS_PER_REQUEST = 0.5
RESTARTS = 2
QUEUE_GROWTH_PER_S = 0.02
"""Six requests in five minutes: below it a queue fluctuates, above it grows."""

_BY_SERVICE = "namespace, service"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. `summary` and `description` are Prometheus templates over the expression's labels."""

    name: str
    expr: str
    lasting: str
    """How long the expression must hold, as a Prometheus duration."""
    severity: Literal["critical", "warning"]
    summary: str
    description: str

    def rule(self) -> Manifest:
        """As in a rule file or a PrometheusRule."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{RUNBOOK}#{self.name.lower()}",
            },
        }


def rule_file() -> Manifest:
    """The rules for a whole cluster: the alerts about every service, the gateway and the operator."""
    services = latency_alerts("", _target_of_each_service()) + serving_alerts("", "")
    return {
        "groups": [
            {"name": "llmservice-services", "rules": [alert.rule() for alert in services]},
            {"name": "llmservice-gateway", "rules": [alert.rule() for alert in gateway_alerts()]},
            {"name": "llmservice-operator", "rules": [alert.rule() for alert in operator_alerts()]},
        ]
    }


def service_groups(namespace: str, name: str, ttft_target_s: float | None) -> list[Manifest]:
    """The rule groups of one service; without a target there are no latency alerts."""
    servers = promql.matchers(namespace=namespace, service=name)
    reports = promql.matchers(namespace=namespace, name=name)
    latency = latency_alerts(servers, f"{ttft_target_s:g}") if ttft_target_s is not None else ()
    alerts = latency + serving_alerts(servers, reports)
    return [{"name": f"llmservice-{namespace}-{name}", "rules": [alert.rule() for alert in alerts]}]


def latency_alerts(servers: str, ttft_target: str) -> tuple[Alert, ...]:
    """Alerts about the target. `servers` selects series of servers; `ttft_target` is an expression in seconds."""
    buckets = promql.selector(promql.TTFT_BUCKET, servers)
    p99, of_rare_scrapes = (
        f"histogram_quantile(0.99, sum by ({_BY_SERVICE}, le) (rate({buckets}[{window}])))" for window in ("1m", "5m")
    )
    return (
        Alert(
            name="LLMServiceTTFTOverTarget",
            # A minute has one sample or none where pods are scraped every 45 s or less often, or are gone.
            expr=f"({p99} or {of_rare_scrapes} and on ({_BY_SERVICE}) {buckets}) > {ttft_target}",
            lasting="1m",
            severity="critical",
            summary="{{ $labels.namespace }}/{{ $labels.service }} misses its target for the time to first token",
            description="p99 time to first token is {{ $value | humanizeDuration }} over the last minute,"
            " above spec.slo.ttftP99.",
        ),
    )


def serving_alerts(servers: str, reports: str) -> tuple[Alert, ...]:
    """Alerts about problems of a service. `reports` selects the operator's series about services."""
    return (
        *_pressure_alerts(servers),
        Alert(
            name="LLMServiceEngineRestarting",
            expr=f"sum by ({_BY_SERVICE})"
            f" (changes({promql.selector('llmservice_process_start_time_seconds', servers)}[30m])) >= {RESTARTS}",
            lasting="0m",
            severity="warning",
            summary="Servers of {{ $labels.namespace }}/{{ $labels.service }} keep restarting",
            description="{{ $value }} restarts within 30 minutes; each fails the requests that the pod held.",
        ),
        Alert(
            name="LLMServiceNotReady",
            # Ready is False in a rollout too, though every replica serves. Of a service that never had a pod, as its
            # spec can't be served or applied, no replicas are asked for.
            expr=f"{_reported('llmservice_operator_ready_replicas', reports)}"
            f" < {_reported('llmservice_operator_desired_replicas', reports)}"
            f" or {_condition('Stalled', reports)} == 1",
            lasting="10m",
            severity="critical",
            summary="{{ $labels.namespace }}/{{ $labels.service }} is not ready",
            description="For 10 minutes fewer replicas than are asked for have served, or the spec can't be served:"
            " reason and message of the condition Ready say why.",
        ),
        Alert(
            name="LLMServiceAdaptersNotReady",
            expr=f"{_condition('AdaptersReady', reports)} == 0",
            lasting="10m",
            severity="warning",
            summary="Pods of {{ $labels.namespace }}/{{ $labels.service }} lack LoRA adapters",
            description="For 10 minutes pods that serve have not had every adapter of the spec; requests for one that"
            " none has get 503. Reason and message of the condition AdaptersReady say which and why.",
        ),
        Alert(
            name="LLMServiceKernelFallback",
            expr=f"max by ({_BY_SERVICE}, pod, part) ({promql.selector(promql.KERNEL_FALLBACK, servers)}) > 0",
            lasting="1m",
            severity="warning",
            summary="{{ $labels.pod }} of {{ $labels.namespace }}/{{ $labels.service }} computes without our kernels",
            description="{{ $labels.part }} is computed by PyTorch, more slowly, because a kernel failed its check on"
            " that GPU; the pod's log says why.",
        ),
        Alert(
            name="LLMServicePredictionError",
            expr=f"abs({_reported('llmservice_operator_prediction_error_percent', reports)})"
            f" > {PREDICTION_ERROR_PERCENT}",
            lasting="15m",
            severity="warning",
            summary="The sizing of {{ $labels.namespace }}/{{ $labels.service }} is off",
            description="The KV cache that servers measured differs from the predicted one"
            ' by {{ $value | printf "%.1f" }} %: maxNumSeqs was worked out from the wrong figure.',
        ),
        Alert(
            name="LLMServicePredictionOff",
            # The P90 of start-ups is longer than most by design: only one that takes longer than predicted is a fault.
            expr=f"abs({_predicted('blocks|itl|ttft', reports)}) > {MOST_ERROR_RATIO}"
            f" or {_predicted('startup', reports)} < -{MOST_ERROR_RATIO}",
            lasting="15m",
            severity="warning",
            summary="{{ $labels.namespace }}/{{ $labels.service }} is not as fast or large as predicted"
            " ({{ $labels.quantity }})",
            description="The prediction of {{ $labels.quantity }} has been off by more than 25 %: what the planner and"
            " the autoscaler work out from it is wrong as well. status.sizing.predictions has the figures.",
        ),
    )


def _pressure_alerts(servers: str) -> tuple[Alert, ...]:
    interactive = promql.selector(promql.WAITING, servers, promql.matchers(lane="interactive"))
    waiting = f"sum by ({_BY_SERVICE}) ({interactive})"
    always_waiting = f"min_over_time(({waiting})[5m:15s]) > 0"
    refused = promql.selector(promql.REJECTED, servers, promql.matchers(reason="queue_full"))
    preemptions = promql.selector("llmservice_num_preemptions_total", servers)
    finished = promql.selector(promql.FINISHED, servers)
    usage = promql.selector(promql.KV_USAGE, servers)
    return (
        Alert(
            name="LLMServiceQueueGrowing",
            expr=f"deriv(({waiting})[5m:15s]) > {QUEUE_GROWTH_PER_S} and {always_waiting}",
            lasting="5m",
            severity="warning",
            summary="The queue of {{ $labels.namespace }}/{{ $labels.service }} keeps growing",
            description="Interactive requests have been waiting for 10 minutes, and every second"
            ' {{ $value | printf "%.2f" }} more do: more arrives than the replicas can serve.',
        ),
        Alert(
            name="LLMServiceQueueFull",  # it grows no more
            expr=f"sum by ({_BY_SERVICE}) (rate({refused}[5m])) > 0 and {always_waiting}",
            lasting="5m",
            severity="warning",
            summary="The queue of {{ $labels.namespace }}/{{ $labels.service }} is full",
            description="Interactive requests have been waiting for 10 minutes, and every second the pods refuse"
            ' {{ $value | printf "%.2f" }} more with 429: more arrives than the replicas can serve.',
        ),
        Alert(
            name="LLMServicePreemptionStorm",
            expr=f"sum by ({_BY_SERVICE}) (rate({preemptions}[5m]))"
            f" / sum by ({_BY_SERVICE}) (rate({finished}[5m])) > {PREEMPTIONS_PER_REQUEST}",
            lasting="5m",
            severity="warning",
            summary="{{ $labels.namespace }}/{{ $labels.service }} throws work away",
            description='{{ $value | printf "%.1f" }} preemptions per finished request: sequences are longer than the'
            " KV cache was sized for, and their work is thrown away.",
        ),
        Alert(
            name="LLMServiceKVCacheSaturated",
            expr=f"avg by ({_BY_SERVICE}) ({usage}) > {KV_SATURATED}",
            lasting="10m",
            severity="warning",
            summary="The KV cache of {{ $labels.namespace }}/{{ $labels.service }} is full",
            description="{{ $value | humanizePercentage }} of the blocks are held, on average over the replicas:"
            " new requests wait for memory, not for compute.",
        ),
    )


def gateway_alerts() -> tuple[Alert, ...]:
    """Alerts about the gateway. Its series have the label `model`, as clients name it."""
    refused = promql.selector("llmservice_gateway_held_seconds_count", promql.matchers(outcome="refused"))
    return (
        Alert(
            name="LLMServiceHeldRequestsRefused",
            # A series that begins with its first refusal has no increase.
            expr=f"sum by (model) (increase({refused}[10m])) > 0"
            f" or sum by (model) ({refused} unless {refused} offset 10m) > 0",
            lasting="0m",
            severity="warning",
            summary="Requests for {{ $labels.model }} had to wait for a pod and were refused",
            description='{{ $value | printf "%.0f" }} requests within 10 minutes found no ready pod, and the gateway'
            " refused them: none became ready in time, none can be expected, or too many were held.",
        ),
        Alert(
            name="LLMServiceLimitsNotShared",
            expr="llmservice_gateway_limits_shared == 0",  # of gateways without a Redis it is NaN
            lasting="2m",
            severity="warning",
            summary="{{ $labels.pod }} cannot reach the Redis that counts the limits of API keys",
            description="For 2 minutes this gateway has allowed each key its share of a limit instead of counting it"
            " with the others: keys may be refused early, and monthly budgets are not enforced.",
        ),
    )


def operator_alerts() -> tuple[Alert, ...]:
    """Alerts about the operator itself."""
    return (
        Alert(
            name="LLMServiceOperatorDown",
            expr="absent(llmservice_operator_pass_seconds_count)",
            lasting="5m",
            severity="critical",
            summary="The LLMService operator is down",
            description="Prometheus has had no metrics of an operator for 5 minutes. Pods serve on, but nothing is"
            " scaled, repaired or rolled out.",
        ),
        Alert(
            name="LLMServiceOperatorNoLeader",
            expr="max by (namespace, job) (llmservice_operator_leader) < 1",
            lasting="1m",
            severity="critical",
            summary="No LLMService operator leads in {{ $labels.namespace }}",
            description="All of its processes have been standing by for a minute: nothing is scaled, repaired or"
            " rolled out. A handover takes seconds.",
        ),
        Alert(
            name="LLMServiceOperatorCannotWatch",
            expr="max by (namespace, job, resource) (llmservice_operator_watch_failing) > 0",
            lasting="5m",
            severity="critical",
            summary="The LLMService operator can't follow {{ $labels.resource }}",
            description="The API server has refused its list or watch of {{ $labels.resource }} for 5 minutes, or can't"
            " be reached: what changes there is not noticed. Its /healthz says why.",
        ),
        Alert(
            name="LLMServicePassesFailing",
            expr=f"{_reported('llmservice_operator_pass_failures_total', '', over='10m')} > 0",
            lasting="15m",
            severity="warning",
            summary="The operator can't bring {{ $labels.namespace }}/{{ $labels.service }} to where it should be",
            description="Passes over this service have been failing for 15 minutes; the operator's log says why.",
        ),
    )


def _reported(metric: str, *matchers: str, over: str = "", by: str = _BY_SERVICE) -> str:
    """The operator's series about services, with the labels of the servers' series."""
    series = promql.selector(metric, *matchers)
    series = f"rate({series}[{over}])" if over else series
    return f'max by ({by}) (label_replace({series}, "service", "$1", "name", "(.+)"))'


def _condition(kind: str, matchers: str) -> str:
    return _reported("llmservice_operator_condition", matchers, promql.matchers(type=kind))


def _predicted(quantities: str, matchers: str) -> str:
    wanted = f'quantity=~"{quantities}"'
    return _reported("llmservice_operator_prediction_error_ratio", matchers, wanted, by=f"{_BY_SERVICE}, quantity")


def _target_of_each_service() -> str:
    return f"on ({_BY_SERVICE}) {_reported('llmservice_operator_ttft_target_seconds')}"
