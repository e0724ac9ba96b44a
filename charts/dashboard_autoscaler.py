"""Replicas, the signals behind them, and the operator itself."""

from __future__ import annotations

from dashboard_queries import (
    FULL,
    OPERATOR,
    RATE,
    READY,
    SERVER,
    SERVICE,
    TTFT_SHARE,
    WAITING,
    p50_p99,
    rate,
    reported,
)
from grafana import Panel, Query, Row

_CONDITION = f"llmservice_operator_condition{{{OPERATOR},type"
# Ready is False where a service is scaled to zero, ScalingActive where the user sets the replicas, GatewayOnly where
# clients may reach the pods.
_NOT_AS_THEY_SHOULD_BE = (
    f'1 + ({_CONDITION}="Ready"}} == 0 and on (namespace, name) llmservice_operator_desired_replicas > 0)'
    f' or 1 + ({_CONDITION}=~"SizingValid|AdaptersReady|InferencePoolReady|SLOFeasible"}} == 0)'
    f' or {_CONDITION}=~"Stalled|Degraded|NameTaken"}} == 1'
)

ROWS = (
    Row(
        "Replicas",
        (
            Panel(
                "Wanted and ready replicas",
                "A gap that stays: no GPU, no quota, or pods that don't come up; the condition Ready says which.",
                "none",
                (
                    Query(reported("llmservice_operator_desired_replicas"), f"wanted {SERVICE}"),
                    Query(READY, f"ready {SERVICE}"),
                ),
            ),
            Panel(
                "Decisions",
                "By direction and the step that arrived at the number.",
                "ops",
                (
                    Query(
                        f"sum by (direction, reason) (rate(llmservice_operator_decisions_total{RATE}))",
                        "{{direction}}: {{reason}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "From overload to a new ready pod",
                "How long users wait for help: pod start, model load and the scaler's own reaction.",
                "s",
                p50_p99("llmservice_operator_overload_to_ready_seconds", "", ""),
            ),
        ),
    ),
    Row(
        "What it scales on",
        (
            Panel(
                "Waiting requests per ready replica",
                "Against spec.autoscaling.queueDepth.",
                "short",
                (Query(f"{WAITING} / on (namespace, service) ({READY} > 0)", SERVICE),),
            ),
            Panel(
                "p99 TTFT against the target",
                "Near 100 % nothing shrinks, above it one replica is added.",
                "percentunit",
                (Query(TTFT_SHARE, SERVICE),),
                ((0.8, "orange"), (1, "red")),
            ),
            Panel(
                "Arrivals and completions",
                "Completions are capped by overload, so that arrivals are what is scaled on.",
                "reqps",
                (
                    Query(rate("llmservice_request_queue_time_seconds_count"), f"begun {SERVICE}"),
                    Query(rate("llmservice_request_success_total"), f"finished {SERVICE}"),
                    Query(rate("llmservice_request_rejected_total"), f"refused {SERVICE}"),
                ),
            ),
            Panel(
                "KV cache in use",
                "Mean over the replicas.",
                "percentunit",
                (Query(f"avg by (namespace, service) (llmservice_kv_cache_usage_perc{{{SERVER}}})", SERVICE),),
                FULL,
            ),
        ),
    ),
    Row(
        "Truth",
        (
            Panel(
                "Conditions that are not as they should be",
                "Nothing to see is good. SLOFeasible: scaling can't meet the target.",
                "none",
                (Query(_NOT_AS_THEY_SHOULD_BE, "{{type}} {{namespace}}/{{name}}"),),
            ),
            Panel(
                "Prediction error of the sizing",
                "Predicted KV blocks against measured ones, either way; past 10 % there is an alert.",
                "percent",
                (Query(f"abs({reported('llmservice_operator_prediction_error_percent')})", SERVICE),),
                ((10, "red"),),
            ),
        ),
    ),
    Row(
        "Operator (all namespaces)",
        (
            Panel(
                "Pass duration",
                "One pass over one service.",
                "s",
                p50_p99("llmservice_operator_pass_seconds", "", ""),
            ),
            Panel(
                "Passes and failures",
                "Failed ones are repeated with growing pauses.",
                "ops",
                (
                    Query(f"sum(rate(llmservice_operator_pass_seconds_count{RATE}))", "passes"),
                    Query(f"sum(rate(llmservice_operator_pass_failures_total{RATE})) or vector(0)", "failures"),
                ),
            ),
            Panel(
                "Leaders",
                "One process may write at any moment; 0 means that nothing is scaled or repaired.",
                "none",
                (Query("sum(llmservice_operator_leader)", "leaders"),),
            ),
        ),
    ),
    Row(
        "API server, as the operator sees it",
        (
            Panel(
                "API requests by verb and code",
                "In steady state the operator writes nothing.",
                "reqps",
                (
                    Query(
                        f"sum by (verb, code) (rate(llmservice_operator_api_requests_total{RATE}))",
                        "{{verb}} {{code}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "API latency",
                "Time to the API server's whole answer.",
                "s",
                p50_p99("llmservice_operator_api_request_seconds", "", ""),
            ),
            Panel(
                "What watches missed",
                "Objects that a resync found otherwise than the operator knew them; they were put right then.",
                "short",
                (
                    Query(
                        "sum(increase(llmservice_operator_resync_differences_total[$__range]))",
                        "differences",
                    ),
                ),
            ),
        ),
    ),
)
