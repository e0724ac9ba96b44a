"""PromQL over the servers' series: their names, quoting, and the queries of a service's scaling signals."""

from __future__ import annotations

import re

RUNNING = "llmservice_num_requests_running"
WAITING = "llmservice_num_requests_waiting"
KV_USAGE = "llmservice_kv_cache_usage_perc"
ADMISSIBLE = "llmservice_admissible_sequences"
FINISHED = "llmservice_request_success_total"
REJECTED = "llmservice_request_rejected_total"
ARRIVED = "llmservice_arrived_requests_total"
ARRIVED_PROMPT_TOKENS = "llmservice_arrived_prompt_tokens_total"
ARRIVED_OUTPUT_TOKENS = "llmservice_arrived_output_tokens_total"
CACHE_HITS = "llmservice_prefix_cache_hits_total"
CACHE_QUERIES = "llmservice_prefix_cache_queries_total"
PROMPT_TOKENS = "llmservice_prompt_tokens_total"
GENERATED_TOKENS = "llmservice_generation_tokens_total"
PROMPT_BUCKET = "llmservice_request_prompt_tokens_bucket"
EMBEDDED = "llmservice_embedding_inputs_total"
TTFT_BUCKET = "llmservice_time_to_first_token_seconds_bucket"
KV_BLOCKS = "llmservice_kv_cache_blocks"
MEMORY = "llmservice_memory_bytes"
KERNEL_FALLBACK = "llmservice_kernel_fallback"
MODEL_INFO = "llmservice_model_info"

BATCH = "batch"
"""The lane of work that may wait; every other request is interactive."""


def string(text: str) -> str:
    """A PromQL string literal (https://prometheus.io/docs/prometheus/latest/querying/basics/#string-literals)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def matchers(**labels: str) -> str:
    """The part of a selector between the braces: equality of every label, nothing without labels."""
    return ",".join(f"{label}={string(value)}" for label, value in labels.items())


def selector(metric: str, *inside: str) -> str:
    """`metric{inside}`; empty parts are left out."""
    parts = ",".join(part for part in inside if part)
    return f"{metric}{{{parts}}}" if parts else metric


def service_queries(namespace: str, name: str, window_s: float, *, counts_batch: bool = True) -> dict[str, str]:
    """The PromQL of a service's scaling signals, by the signal's name, over all of its present pods.

    `counts_batch`: whether requests of the batch lane ask for replicas. Series without a lane are counted in any case.
    """
    # A Deployment's pods are called NAME-HASH-RANDOM; of long names the hash is cut off.
    pods = re.escape(name).replace("\\-", "-") + "-[a-z0-9]+(-[a-z0-9]+)?"
    own = f"{matchers(namespace=namespace)},pod=~{string(pods)}"
    counted = own if counts_batch else f"{own},lane!={string(BATCH)}"
    window = f"[{max(1, round(window_s))}s]"
    replicas = f"count(count by (pod) ({selector(RUNNING, own)}))"
    finished = f"sum(rate({selector(FINISHED, own)}{window}))"
    rejected = f"(sum(rate({selector(REJECTED, own)}{window})) or vector(0))"
    growth = [f"(sum(deriv({selector(gauge, own)}{window})) or vector(0))" for gauge in (RUNNING, WAITING)]
    return {
        "queue": f"sum({selector(WAITING, counted)}) / {replicas}",
        "utilization": f"sum({selector(RUNNING, counted)}) / sum({selector(ADMISSIBLE, own)})",
        "kvCache": f"avg({selector(KV_USAGE, own)})",
        "arrivals": f"({' + '.join([finished, rejected, *growth])}) / {replicas}",
        "ttftP99": f"histogram_quantile(0.99, sum by (le) (rate({selector(TTFT_BUCKET, own)}{window})))",
    }
