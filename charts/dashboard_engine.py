"""Inside the servers: batches, KV cache, preemptions, and where a request's time goes."""

from __future__ import annotations

from dashboard_queries import FULL, POD, SERVER, SERVICE, p50_p99, per_pod, rate
from grafana import Panel, Query, Row

ROWS = (
    Row(
        "Batch",
        (
            Panel(
                "Running sequences",
                "Per pod, and how many sequences like those before the KV cache is predicted to hold at once.",
                "short",
                (
                    Query(per_pod("llmservice_num_requests_running"), POD),
                    Query(per_pod("llmservice_admissible_sequences"), f"admissible {POD}"),
                ),
            ),
            Panel(
                "Waiting sequences by lane",
                "Batch work waits for interactive work by design.",
                "short",
                (
                    Query(
                        f"sum by (pod, lane) (llmservice_num_requests_waiting{{{SERVER}}})",
                        "{{lane}} {{pod}}",
                    ),
                ),
            ),
            Panel(
                "Sequences in a step",
                "A decode step reads every weight once, whatever the batch: larger ones are cheaper per token.",
                "short",
                p50_p99("llmservice_batch_size", "pod"),
            ),
            Panel(
                "Tokens in a step",
                "Prompt chunks and decoded tokens under the budget maxNumBatchedTokens.",
                "short",
                p50_p99("llmservice_iteration_tokens", "pod"),
            ),
        ),
    ),
    Row(
        "KV cache",
        (
            Panel(
                "Blocks held",
                "Share of the pool that running sequences hold; what is cached for prefixes can be taken back.",
                "percentunit",
                (Query(per_pod("llmservice_kv_cache_usage_perc"), POD),),
                FULL,
            ),
            Panel(
                "Blocks by state",
                "Free, held by sequences, cached for prompts that begin alike.",
                "short",
                (Query(f"sum by (state) (llmservice_kv_cache_blocks{{{SERVER}}})", "{{state}}"),),
                stacked=True,
            ),
            Panel(
                "Preemptions",
                "Sequences that lost their blocks to others; recompute costs compute, swap costs copies.",
                "ops",
                (Query(rate("llmservice_num_preemptions_total", "pod, mode"), "{{mode}} {{pod}}"),),
            ),
            Panel(
                "Prefix cache hits",
                "Share of prompt tokens whose keys and values were there already.",
                "percentunit",
                (
                    Query(
                        f"{rate('llmservice_prefix_cache_hits_total', 'pod')}"
                        f" / {rate('llmservice_prefix_cache_queries_total', 'pod')}",
                        POD,
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Where the time of a request goes",
        (
            Panel(
                "Queue wait",
                "From arrival to the first step. Grows first when there are too few replicas.",
                "s",
                p50_p99("llmservice_request_queue_time_seconds"),
            ),
            Panel(
                "Prefill",
                "From the first step to the first token. Grows with prompts, and bounds the target that can be met.",
                "s",
                p50_p99("llmservice_request_prefill_time_seconds"),
            ),
            Panel(
                "Decode",
                "From the first token to the last.",
                "s",
                p50_p99("llmservice_request_decode_time_seconds"),
            ),
            Panel(
                "Tokens a second",
                "Generated tokens per pod: the throughput at those latencies.",
                "short",
                (Query(rate("llmservice_generation_tokens_total", "pod"), POD),),
            ),
        ),
    ),
    Row(
        "Embeddings",
        (
            Panel("Embedding latency", "Arrival to all vectors.", "s", p50_p99("llmservice_embedding_request_seconds")),
            Panel(
                "Embedded tokens",
                "Tokens a second turned into vectors.",
                "short",
                (Query(rate("llmservice_embedding_tokens_total"), SERVICE),),
            ),
        ),
    ),
    Row(
        "Process",
        (
            Panel(
                "Measured memory by kind",
                "As the server measured it after loading.",
                "bytes",
                (Query(f"sum by (pod, kind) (llmservice_memory_bytes{{{SERVER}}})", "{{kind}} {{pod}}"),),
            ),
            Panel(
                "Resident memory",
                "Of the HTTP process; a slope that never ends is a leak.",
                "bytes",
                (Query(per_pod("llmservice_process_resident_memory_bytes"), POD),),
            ),
            Panel(
                "Load time",
                "From the engine's start until it could serve.",
                "s",
                (Query(per_pod("llmservice_model_load_seconds"), POD),),
            ),
            Panel(
                "Restarts",
                "Within half an hour, in the same pod.",
                "none",
                (Query(f"sum by (pod) (changes(llmservice_process_start_time_seconds{{{SERVER}}}[30m]))", POD),),
                ((1, "orange"), (2, "red")),
            ),
        ),
    ),
)
