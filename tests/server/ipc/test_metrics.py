"""The metrics page: names, labels, and counts that agree with the requests."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmservice_server.ipc.metrics import Metrics
from llmservice_server.types.messages import Ready, Stats


def _stats(**changes: Any) -> Stats:
    figures = {
        "num_running": {"interactive": 3},
        "num_waiting": {"interactive": 5, "batch": 0},
        "blocks_free": 60,
        "blocks_held": 30,
        "blocks_cached": 10,
        "preemptions": {"recompute": 2, "swap": 1},
        "prefix_queries": 40,
        "prefix_hits": 16,
        "batch_size": 3,
        "iteration_tokens": 130,
        "num_admissible": 12,
    }
    return Stats(**(figures | changes))


def _ready(**changes: Any) -> Ready:
    figures = {
        "max_model_len": 1,
        "max_num_seqs": 1,
        "block_size": 1,
        "num_blocks": 1,
        "max_request_tokens": 1,
        "embedding_size": 8,
        "max_embedding_tokens": 1,
        "memory_bytes": {},
        "architecture": "LlamaForCausalLM",
        "model_code": "own",
        "load_s": 1.0,
    }
    return Ready(**(figures | changes))


def _samples(metrics: Metrics) -> dict[str, float]:
    """By name and labels, as they are printed."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_a_steps_figures_become_gauges_totals_and_histograms() -> None:
    metrics = Metrics("llmservice_", "tiny")
    metrics.set_stats(_stats())
    metrics.set_stats(_stats(preemptions={"recompute": 4, "swap": 1}))
    samples = _samples(metrics)
    assert samples["llmservice_num_requests_running{lane=interactive}"] == 3
    assert samples["llmservice_num_requests_waiting{lane=interactive}"] == 5
    assert samples["llmservice_kv_cache_usage_perc"] == 0.3
    assert samples["llmservice_kv_cache_blocks{state=free}"] == 60
    assert samples["llmservice_kv_cache_blocks{state=held}"] == 30
    assert samples["llmservice_kv_cache_blocks{state=cached}"] == 10
    assert samples["llmservice_num_preemptions_total{mode=recompute}"] == 4
    assert samples["llmservice_num_preemptions_total{mode=swap}"] == 1
    assert samples["llmservice_prefix_cache_queries_total"] == 40
    assert samples["llmservice_prefix_cache_hits_total"] == 16
    assert samples["llmservice_iteration_tokens_sum"] == 260
    assert samples["llmservice_batch_size_count"] == 2


def test_an_idle_engines_figures_count_as_no_step() -> None:
    metrics = Metrics("llmservice_", "tiny")
    metrics.set_stats(_stats(num_running={}, num_waiting={"interactive": 0}, batch_size=0, iteration_tokens=0))
    samples = _samples(metrics)
    assert samples["llmservice_num_requests_running{lane=interactive}"] == 0
    assert samples["llmservice_num_requests_waiting{lane=interactive}"] == 0
    assert samples["llmservice_iteration_tokens_count"] == 0


def test_what_was_measured_at_start_is_shown_before_the_first_request() -> None:
    metrics = Metrics("llmservice_", "tiny")
    memory = {"weights": 100, "kv_cache": 200, "activations": 30, "total": 400}
    start = {"load_s": 1.5, "compile_s": 2.25, "kernels_compiled": 7, "kernels_loaded": 2}
    metrics.set_ready(_ready(num_blocks=99, memory_bytes=memory, fallbacks={"attention": "it raised"}, **start))
    samples = _samples(metrics)
    assert {kind: samples[f"llmservice_memory_bytes{{kind={kind}}}"] for kind in memory} == memory
    assert samples["llmservice_model_load_seconds"] == 3.75  # compiling is part of it
    assert samples["llmservice_kernel_compile_seconds"] == 2.25
    assert [samples[f"llmservice_kernels{{source={source}}}"] for source in ("compiled", "loaded")] == [7, 2]
    assert samples["llmservice_kernel_fallback{part=attention}"] == 1
    assert samples["llmservice_kernel_fallback{part=decode_graphs}"] == 0
    assert [samples[f"llmservice_kv_cache_blocks{{state={state}}}"] for state in ("free", "held", "cached")] == [
        99,
        0,
        0,
    ]
    assert samples["llmservice_num_requests_running{lane=interactive}"] == 0
    assert samples["llmservice_num_requests_waiting{lane=interactive}"] == 0


def test_endpoint_pickers_find_one_series_of_each_name_that_they_read() -> None:
    metrics = Metrics("llmservice_", "tiny")
    metrics.set_ready(_ready(block_size=16, num_blocks=99, max_loras=2))
    metrics.set_stats(_stats(num_waiting={"interactive": 5, "batch": 2}))
    metrics.set_adapters([("poet", "1", "loaded"), ("clerk", "1", "loaded"), ("old", "1", "evicted")])

    samples = {name: value for name, value in _samples(metrics).items() if name.startswith("vllm:")}

    since_s = samples.pop(
        "vllm:lora_requests_info{max_lora=2,model_name=tiny,running_lora_adapters=poet,clerk,waiting_lora_adapters=}"
    )
    assert since_s > 1_600_000_000
    assert samples == {
        "vllm:num_requests_running{model_name=tiny}": 3,
        "vllm:num_requests_waiting{model_name=tiny}": 7,
        "vllm:kv_cache_usage_perc{model_name=tiny}": 0.3,
        "vllm:cache_config_info{block_size=16,model_name=tiny,num_gpu_blocks=99}": 1,
    }


def test_without_adapters_there_is_no_series_about_them() -> None:
    metrics = Metrics("llmservice_", "tiny")
    metrics.set_ready(_ready())

    assert not [name for name in _samples(metrics) if name.startswith("vllm:lora")]


def test_the_prefix_of_vllm_gives_its_names_and_its_label() -> None:
    metrics = Metrics("vllm:", "tiny")
    metrics.set_stats(_stats())
    metrics.ttft.observe(0.1)
    metrics.labels(metrics.request_success, finished_reason="stop").inc()
    samples = _samples(metrics)
    assert samples["vllm:num_requests_running{lane=interactive,model_name=tiny}"] == 3
    assert samples["vllm:num_requests_waiting{lane=interactive,model_name=tiny}"] == 5
    assert samples["vllm:kv_cache_usage_perc{model_name=tiny}"] == 0.3
    assert samples["vllm:time_to_first_token_seconds_count{model_name=tiny}"] == 1
    assert samples["vllm:request_success_total{finished_reason=stop,model_name=tiny}"] == 1
    assert samples["vllm:iteration_tokens_total_count{model_name=tiny}"] == 1
    assert samples["vllm:num_preemptions_total{mode=recompute,model_name=tiny}"] == 2


@pytest.mark.parametrize(
    "name", ["time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds"]
)
def test_latency_buckets_start_at_a_millisecond(name: str) -> None:
    buckets = [sample for sample in _samples(Metrics("llmservice_", "tiny")) if f"{name}_bucket" in sample]
    assert buckets[0] == f"llmservice_{name}_bucket{{le=0.001}}"


def test_counts_agree_with_what_was_asked(server: Any) -> None:
    before = server.metrics()

    def grown(name: str, **labels: str) -> float:
        wanted = labels.items()
        found = sum(value for (one, has), value in before.items() if one == name and wanted <= has)
        return float(server.metric(name, **labels) - found)

    body = {"model": "tiny", "prompt": [55] * 10, "max_tokens": 6, "ignore_eos": True, "n": 2}
    for _ in range(3):
        assert server.post("/v1/completions", body)[0] == 200
    assert server.post("/v1/completions", body | {"max_tokens": 1, "n": 1})[0] == 200
    assert server.post("/v1/completions", body | {"max_tokens": 0})[0] == 400
    server.wait_until_idle()
    expected = {
        "time_to_first_token_seconds_count": 7,
        "inter_token_latency_seconds_count": 30,
        "e2e_request_latency_seconds_count": 7,
        "request_queue_time_seconds_count": 7,
        "request_prefill_time_seconds_count": 7,
        "request_decode_time_seconds_count": 7,
        "request_prompt_tokens_sum": 70,
        "request_generation_tokens_sum": 37,
        "prompt_tokens_total": 70,
        "generation_tokens_total": 37,
        "prefix_cache_queries_total": 70,
        "num_requests_running": 0,
        "kv_cache_usage_perc": 0,
    }
    assert {name: grown(f"llmservice_{name}") for name in expected} == expected
    assert grown("llmservice_request_success_total", finished_reason="length") == 7
    assert grown("llmservice_request_rejected_total", reason="invalid_request") == 1
    assert server.metric("llmservice_memory_bytes", kind="kv_cache") == pytest.approx(32 * 2**20, rel=0.01)
