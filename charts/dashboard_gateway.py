"""What the gateway does with requests: answers, the choice of pods, and requests held for pods that start."""

from __future__ import annotations

from dashboard_queries import p50_p99, rate
from grafana import Panel, Query, Row

AFFINITY = "llmservice_gateway_affinity_total"
_HITS = rate(AFFINITY, "model", 'result="hit"')

ROWS = (
    Row(
        "Traffic",
        (
            Panel(
                "Requests by model and code",
                "What clients were answered; 499 is a client that left.",
                "reqps",
                (Query(rate("llmservice_gateway_requests_total", "model, code", ""), "{{model}} {{code}}"),),
                stacked=True,
            ),
            Panel(
                "Time to a pod's headers",
                "From passing a request on to the response's headers; for a streamed answer that is its first token.",
                "s",
                p50_p99("llmservice_gateway_upstream_latency_seconds", "model", ""),
            ),
            Panel(
                "Added latency",
                "From a request's body to passing it on: limits of keys and the choice of a pod, without time held.",
                "s",
                p50_p99("llmservice_gateway_added_latency_seconds", "model", ""),
            ),
            Panel(
                "In flight",
                "Requests that are being answered.",
                "short",
                (Query("sum by (model) (llmservice_gateway_in_flight)", "{{model}}"),),
            ),
        ),
    ),
    Row(
        "Choice of pods",
        (
            Panel(
                "Affinity hit rate",
                "Of requests whose prompt begins as an earlier one's, those sent to a pod that had that one; the rest"
                " went elsewhere because that pod had too much to do, or was gone.",
                "percentunit",
                (Query(f"{_HITS} / {rate(AFFINITY, 'model', '')}", "{{model}}"),),
            ),
            Panel(
                "Passed to another pod",
                "The first one refused, was draining, or had no free slot when another had (moved).",
                "reqps",
                (Query(rate("llmservice_gateway_retries_total", "model, reason", ""), "{{model}} {{reason}}"),),
                stacked=True,
            ),
        ),
    ),
    Row(
        "Requests held until a pod is ready",
        (
            Panel(
                "Held now",
                "They wait for a service at zero, or whose pods start.",
                "short",
                (Query("sum by (model) (llmservice_gateway_held_requests)", "{{model}}"),),
            ),
            Panel(
                "Time that requests were held",
                "By outcome: forwarded to a pod, refused, or the client left.",
                "s",
                p50_p99("llmservice_gateway_held_seconds", "model, outcome", ""),
            ),
            Panel(
                "Wake-ups",
                "How often a request was the first to be held for a service without a ready pod.",
                "short",
                (Query("sum by (model) (increase(llmservice_gateway_wake_ups_total[$__rate_interval]))", "{{model}}"),),
            ),
        ),
    ),
    Row(
        "API keys, by their names",
        (
            Panel(
                "Requests by key, model and code",
                "What the clients of each key were answered; 429 is a limit of the key or a full queue.",
                "reqps",
                (
                    Query(
                        rate("llmservice_gateway_key_requests_total", "key, model, code", ""),
                        "{{key}} {{model}} {{code}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Tokens by key",
                "As pods report them: prompt with cached ones, cached, completion.",
                "short",
                (Query(rate("llmservice_gateway_key_tokens_total", "key, kind", ""), "{{key}} {{kind}}"),),
            ),
            Panel(
                "Refused by a limit",
                "By key and limit: requests or tokens per minute, concurrent requests, the month's tokens.",
                "reqps",
                (Query(rate("llmservice_gateway_key_refusals_total", "key, limit", ""), "{{key}} {{limit}}"),),
                stacked=True,
            ),
            Panel(
                "Limits counted together",
                "1: in Redis, over all gateways. 0: each gateway allows its share, without Redis or where it is down.",
                "none",
                (Query("min by (pod) (llmservice_gateway_limits_shared)", "{{pod}}"),),
            ),
        ),
    ),
)
