"""The PromQL that dashboards are made of: the same selectors, windows and names everywhere."""

from __future__ import annotations

from grafana import Query

SERVER = 'namespace=~"$namespace",service=~"$service"'
OPERATOR = 'namespace=~"$namespace",name=~"$service"'
SERVICE = "{{namespace}}/{{service}}"
POD = "{{pod}}"
RATE = "[$__rate_interval]"
FULL = ((0.8, "orange"), (0.95, "red"))


def rate(metric: str, by: str = "namespace, service", matchers: str = SERVER) -> str:
    selector = f"{{{matchers}}}" if matchers else ""
    return f"sum by ({by}) (rate({metric}{selector}{RATE}))"


def quantile(q: float, histogram: str, by: str = "namespace, service", matchers: str = SERVER) -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, matchers)})"


def p50_p99(histogram: str, by: str = "namespace, service", matchers: str = SERVER) -> tuple[Query, Query]:
    name = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return (
        Query(quantile(0.5, histogram, by, matchers), f"p50 {name}".strip()),
        Query(quantile(0.99, histogram, by, matchers), f"p99 {name}".strip()),
    )


def per_pod(metric: str, *more: str) -> str:
    return f"sum by (pod) ({metric}{{{','.join((SERVER, *more))}}})"


def reported(metric: str, *more: str) -> str:
    """What the operator says of a service, under the names that the servers' series have."""
    series = f"{metric}{{{','.join((OPERATOR, *more))}}}"
    return f'max by (namespace, service) (label_replace({series}, "service", "$1", "name", "(.+)"))'


TTFT = "llmservice_time_to_first_token_seconds"
ITL = "llmservice_inter_token_latency_seconds"
E2E = "llmservice_e2e_request_latency_seconds"
TARGET = reported("llmservice_operator_ttft_target_seconds")
WAITING = f"sum by (namespace, service) (llmservice_num_requests_waiting{{{SERVER}}})"
READY = reported("llmservice_operator_ready_replicas")
TTFT_SHARE = f"{quantile(0.99, TTFT)} / on (namespace, service) {TARGET}"
