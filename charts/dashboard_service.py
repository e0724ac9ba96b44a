"""What users get: latency and its target beside throughput and refusals."""

from __future__ import annotations

from dashboard_queries import E2E, ITL, READY, SERVICE, TARGET, TTFT, TTFT_SHARE, p50_p99, quantile, rate
from grafana import Panel, Query, Row

ROWS = (
    Row(
        "Now",
        (
            Panel(
                "p99 TTFT against the target",
                "p99 time to first token as a share of spec.slo.ttftP99; above 100 % the target is missed.",
                "percentunit",
                (Query(TTFT_SHARE, SERVICE),),
                ((0.8, "orange"), (1, "red")),
                single=True,
            ),
            Panel(
                "Generated tokens",
                "Tokens a second over all replicas.",
                "short",
                (Query(rate("llmservice_generation_tokens_total"), SERVICE),),
                single=True,
            ),
            Panel(
                "p99 between tokens",
                "p99 inter-token latency: what a reader of the stream feels.",
                "s",
                (Query(quantile(0.99, ITL), SERVICE),),
                single=True,
            ),
            Panel("Ready replicas", "Pods that serve.", "none", (Query(READY, SERVICE),), single=True),
        ),
    ),
    Row(
        "Latency and throughput",
        (
            Panel(
                "Time to first token",
                "From arrival at the server to the first token, queue included, with the target.",
                "s",
                (*p50_p99(TTFT), Query(TARGET, "target {{namespace}}/{{service}}")),
            ),
            Panel(
                "Tokens a second",
                "Generated and prompt tokens, server-wide. Compare with the latencies beside it at the same moment.",
                "short",
                (
                    Query(rate("llmservice_generation_tokens_total"), f"generated {SERVICE}"),
                    Query(rate("llmservice_prompt_tokens_total"), f"prompt {SERVICE}"),
                ),
            ),
        ),
    ),
    Row(
        "The whole stream",
        (
            Panel("Time between tokens", "Inter-token latency, pooled over tokens.", "s", p50_p99(ITL)),
            Panel("Whole request", "From arrival to the last token.", "s", p50_p99(E2E)),
        ),
    ),
    Row(
        "Traffic",
        (
            Panel(
                "Finished requests by reason",
                "stop and length are answers, abort is a client that left, error is ours.",
                "reqps",
                (Query(rate("llmservice_request_success_total", "finished_reason"), "{{finished_reason}}"),),
                stacked=True,
            ),
            Panel(
                "Refused requests by reason",
                "Refused before they cost anything: a full queue, a draining pod, a body that is not understood.",
                "reqps",
                (Query(rate("llmservice_request_rejected_total", "reason"), "{{reason}}"),),
                stacked=True,
            ),
            Panel(
                "Prompt and answer lengths",
                "Means in tokens. Longer ones need more KV cache than the sizing may assume (expectedTokens).",
                "short",
                tuple(
                    Query(
                        f"{rate(f'llmservice_request_{kind}_tokens_sum')}"
                        f" / {rate(f'llmservice_request_{kind}_tokens_count')}",
                        f"{kind} {SERVICE}",
                    )
                    for kind in ("prompt", "generation")
                ),
            ),
        ),
    ),
)
