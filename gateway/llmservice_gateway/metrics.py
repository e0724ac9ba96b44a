"""The gateway's metrics. Labels have the names of known models only, so that clients cannot create series."""

from __future__ import annotations

import math
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

UNKNOWN_MODEL = ""

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320
)  # fmt: skip
ADDED_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class GatewayMetrics:
    """One registry for each gateway: two in one process (tests) share no figures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "llmservice_gateway_requests_total",
            "Requests answered, by model and status code; 499: the client left before the answer was complete",
            ["model", "code"],
        )
        self.in_flight = gauge("llmservice_gateway_in_flight", "Requests being answered now", ["model"])
        self.retries = counter(
            "llmservice_gateway_retries_total",
            "Requests passed to another pod: the first refused, was draining, had no slot when another had (moved),"
            " broke off while it ran the request (lost) or had it wait (lost_waiting), or does not trust this gateway's"
            " signature (untrusted)",
            ["model", "reason"],
        )
        self.added_latency = histogram(
            "llmservice_gateway_added_latency_seconds",
            "From a request's body to passing it on: limits of its key and the choice of a pod, without time held",
            ["model"],
            buckets=ADDED_BUCKETS_S,
        )
        self.upstream_latency = histogram(
            "llmservice_gateway_upstream_latency_seconds",
            "From passing a request on to the response's headers",
            ["model"],
            buckets=LATENCY_BUCKETS_S,
        )
        self.held = gauge("llmservice_gateway_held_requests", "Requests held until a pod is ready", ["model"])
        self.held_seconds = histogram(
            "llmservice_gateway_held_seconds",
            "How long requests were held, by outcome: forwarded, refused (no pod is to be expected, it took too long,"
            " or too many are held), left",
            ["model", "outcome"],
            buckets=LATENCY_BUCKETS_S,
        )
        self.wake_ups = counter(
            "llmservice_gateway_wake_ups_total",
            "Times that a request was the first to be held for a service without a ready pod",
            ["model"],
        )
        self.affinity = counter(
            "llmservice_gateway_affinity_total",
            "Requests whose prompt begins as an earlier one's: hit, sent to a pod that had that one; miss, to another",
            ["model", "result"],
        )
        self.key_requests = counter(
            "llmservice_gateway_key_requests_total",
            "Requests answered, by the API key's name, model and status code",
            ["key", "model", "code"],
        )
        self.key_tokens = counter(
            "llmservice_gateway_key_tokens_total",
            "Tokens by the API key's name and model, as pods report them: prompt (cached ones too), cached, completion",
            ["key", "model", "kind"],
        )
        self.key_refusals = counter(
            "llmservice_gateway_key_refusals_total",
            "Requests refused with 429, by the API key's name and the limit: requests, tokens, concurrent_requests,"
            " monthly_tokens",
            ["key", "limit"],
        )
        self.limits_shared = gauge(
            "llmservice_gateway_limits_shared",
            "Whether limits are counted in Redis (1), or it cannot be reached (0); NaN: the gateway has none",
        )
        self.limits_shared.set(math.nan)
