"""The server's metrics for Prometheus. Names and labels are a contract with dashboards, alerts and the autoscaler.

`--metrics-prefix vllm:` gives vLLM's names and its `model_name` label, so that dashboards and scalers for vLLM work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmservice_server.engine.config import LANES
from llmservice_server.ipc.endpoint_picker import EndpointPickerMetrics
from llmservice_server.ipc.step_times import LATENCY_BUCKETS, StepTimes, cumulative
from llmservice_server.text.output_processor import RequestState
from llmservice_server.types.messages import Fallback, FinishReason, Ready, Stats


class TokenMetrics(Collector):
    """The counter `generation_tokens` and the histogram `inter_token_latency_seconds`."""

    def __init__(self, prefix: str, constant: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._constant = constant
        self._counts = [0] * len(LATENCY_BUCKETS)
        self._sum_s = 0.0
        self._num_tokens = 0

    def record_first(self, num_tokens: int) -> None:
        """The first tokens of an answer have no latency since an earlier one."""
        self._num_tokens += num_tokens

    def record(self, num_tokens: int, since_last_s: float) -> None:
        """Later tokens. Several of one step count as equally far apart."""
        self._num_tokens += num_tokens
        self._counts[bisect_left(LATENCY_BUCKETS, since_last_s / num_tokens)] += num_tokens
        self._sum_s += since_last_s

    def collect(self) -> Iterator[Metric]:
        names, values = tuple(self._constant), tuple(self._constant.values())
        tokens = CounterMetricFamily(self._prefix + "generation_tokens", "Tokens generated", labels=names)
        tokens.add_metric(values, self._num_tokens)
        yield tokens
        name = self._prefix + "inter_token_latency_seconds"
        gaps = HistogramMetricFamily(name, "Between two tokens of a sequence", labels=names)
        gaps.add_metric(values, cumulative(self._counts), self._sum_s)
        yield gaps


VLLM_PREFIX = "vllm:"
_M = TypeVar("_M", Counter, Gauge, Histogram)

# Seconds; from 1 ms on for the same reason as `LATENCY_BUCKETS`. vLLM's start at 300 ms.
_WAIT_BUCKETS: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
_WAIT_BUCKETS += (0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0)
_WAIT_BUCKETS += (40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_LENGTH_BUCKETS = tuple(float(2**power) for power in range(18))  # tokens
_BATCH_BUCKETS = tuple(float(2**power) for power in range(11))  # sequences


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, prefix: str, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page's size for no use
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._constant = {"model_name": model_name} if prefix == VLLM_PREFIX else {}
        self._engine_totals = _EngineTotals(prefix, self._constant)
        self.registry.register(self._engine_totals)
        self._picker = EndpointPickerMetrics(model_name, with_totals=prefix != VLLM_PREFIX)
        self.registry.register(self._picker)
        ProcessCollector(namespace="llmservice", registry=self.registry)  # a start time that changes is a restart

        self.num_requests_running = self._gauge("num_requests_running", "Sequences in the running batch", ("lane",))
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sequences waiting to be run", ("lane",))
        self.admissible_sequences = self._gauge(
            "admissible_sequences", "Sequences like those before that the KV cache holds, at most those of a step"
        )
        self.kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that is held, 0 to 1")
        self.kv_cache_blocks = self._gauge(
            "kv_cache_blocks", "Blocks of the KV cache, the null block apart", ("state",)
        )
        self.memory_bytes = self._gauge("memory_bytes", "Memory as measured after loading", ("kind",))
        self.kernel_fallback = self._gauge(
            "kernel_fallback", "1 where torch computes a part because our kernels failed their check there", ("part",)
        )
        self.model_info = self._gauge(
            "model_info", "1: the architecture, and whose code computes it", ("architecture", "model_code")
        )
        self.model_load_seconds = self._gauge("model_load_seconds", "From the engine's start until it could serve")
        self.kernel_compile_seconds = self._gauge(
            "kernel_compile_seconds", "Of it, the time in which kernels were compiled"
        )
        self.kernels = self._gauge("kernels", "That a start compiled, or loaded from the cache", ("source",))

        self.lora_adapter = self._gauge(
            "lora_adapter", "1: a LoRA adapter, loaded, evicted or failed", ("name", "version", "state")
        )

        self.tokens = TokenMetrics(prefix, self._constant)
        self.registry.register(self.tokens)
        self.steps = StepTimes(prefix, self._constant)
        self.registry.register(self.steps)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences that produced a token")
        lane = ("lane",)
        self.arrived_requests = self._counter("arrived_requests", "Sequences that came, refused ones included", lane)
        self.arrived_prompt_tokens = self._counter("arrived_prompt_tokens", "Prompt tokens of these", lane)
        self.arrived_output_tokens = self._counter(
            "arrived_output_tokens", "Tokens of their answers, as predicted when they came", lane
        )
        self.request_success = self._counter("request_success", "Sequences ended, by reason", ("finished_reason",))
        self.request_rejected = self._counter("request_rejected", "HTTP requests refused, by reason", ("reason",))
        self.ignored_parameters = self._counter(
            "request_ignored_parameters", "Parameters of requests that are ignored because they are unknown"
        )

        iteration_tokens = "iteration_tokens_total" if prefix == VLLM_PREFIX else "iteration_tokens"
        self.iteration_tokens = self._histogram(iteration_tokens, "Tokens computed in a step", _LENGTH_BUCKETS)
        self.batch_size = self._histogram("batch_size", "Sequences in a step", _BATCH_BUCKETS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first scheduled", _WAIT_BUCKETS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Scheduled to first token", _WAIT_BUCKETS)
        self.decode_time = self._histogram("request_decode_time_seconds", "First token to last", _WAIT_BUCKETS)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _WAIT_BUCKETS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the last token", _WAIT_BUCKETS)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt lengths", _LENGTH_BUCKETS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Answer lengths", _LENGTH_BUCKETS)

        self.embedding_inputs = self._counter("embedding_inputs", "Inputs turned into embeddings")
        self.embedding_tokens = self._counter("embedding_tokens", "Tokens of the inputs turned into embeddings")
        self.embedding_time = self._histogram("embedding_request_seconds", "Arrival to all vectors", _WAIT_BUCKETS)

        for reason in get_args(FinishReason):
            self.request_success.labels(**self._constant, finished_reason=reason)  # so that rate() sees the first one

    def set_ready(self, ready: Ready) -> None:
        """Set what was measured at start, once the engine can serve."""
        self._picker.set_ready(ready)
        self.model_load_seconds.set(ready.load_s + ready.compile_s)
        self.kernel_compile_seconds.set(ready.compile_s)
        self.labels(self.kernels, source="compiled").set(ready.kernels_compiled)
        self.labels(self.kernels, source="loaded").set(ready.kernels_loaded)
        self.labels(self.model_info, architecture=ready.architecture, model_code=ready.model_code).set(1)
        for kind, num_bytes in ready.memory_bytes.items():
            self.labels(self.memory_bytes, kind=kind).set(num_bytes)
        for part in get_args(Fallback):
            self.labels(self.kernel_fallback, part=part).set(part in ready.fallbacks)
        for lane in LANES:  # a scaler has to see 0 before the first request, not a gap
            self.labels(self.num_requests_waiting, lane=lane).set(0)
            self.labels(self.num_requests_running, lane=lane).set(0)
        for state in ("held", "cached"):
            self.labels(self.kv_cache_blocks, state=state).set(0)
        self.labels(self.kv_cache_blocks, state="free").set(ready.num_blocks)

    def set_stats(self, stats: Stats) -> None:
        """Set a step's figures; those of an idle engine count as no step."""
        self._engine_totals.stats = self._picker.stats = stats
        for lane in LANES:
            self.labels(self.num_requests_running, lane=lane).set(stats.num_running.get(lane, 0))
        for lane, number in stats.num_waiting.items():
            self.labels(self.num_requests_waiting, lane=lane).set(number)
        blocks = {"free": stats.blocks_free, "held": stats.blocks_held, "cached": stats.blocks_cached}
        for state, number in blocks.items():
            self.labels(self.kv_cache_blocks, state=state).set(number)
        self.admissible_sequences.set(stats.num_admissible)
        self.kv_cache_usage.set(stats.blocks_held / max(1, sum(blocks.values())))
        if stats.step is not None:
            self.steps.observe(stats.step)
        if stats.iteration_tokens:
            self.iteration_tokens.observe(stats.iteration_tokens)
            self.batch_size.observe(stats.batch_size)

    def set_adapters(self, adapters: Iterable[tuple[str, str, str]]) -> None:
        """Name, version and state of all."""
        self.lora_adapter.clear()
        listed = list(adapters)
        self._picker.set_adapters([name for name, _, state in listed if state == "loaded"])
        for name, version, state in listed:
            self.labels(self.lora_adapter, name=name, version=version, state=state).set(1)

    def record_first_tokens(self, state: RequestState, num_tokens: int) -> None:
        """Of `Recorder`, like the next two."""
        self.tokens.record_first(num_tokens)
        ttft_s = state.ttft_s or 0.0
        self.ttft.observe(ttft_s)
        self.queue_time.observe(state.queue_s)
        self.prefill_time.observe(max(0.0, ttft_s - state.queue_s))
        self.prompt_tokens.inc(state.num_prompt_tokens)

    def record_tokens(self, num_tokens: int, since_last_s: float) -> None:
        self.tokens.record(num_tokens, since_last_s)

    def record_finished(self, state: RequestState) -> None:
        reason = state.finish_reason or "abort"
        self.labels(self.request_success, finished_reason=reason).inc()
        if reason in ("stop", "length"):
            self.e2e.observe(state.last_token_s - state.request.arrival_s)
            self.request_prompt_tokens.observe(state.num_prompt_tokens)
            self.request_generation_tokens.observe(state.num_tokens)
            if state.first_token_s is not None:
                self.decode_time.observe(state.last_token_s - state.first_token_s)

    def observe_embedding(self, num_inputs: int, num_tokens: int, duration_s: float) -> None:
        """Count a completed request for embeddings."""
        self.embedding_inputs.inc(num_inputs)
        self.embedding_tokens.inc(num_tokens)
        self.embedding_time.observe(duration_s)

    def labels(self, metric: _M, **labels: str) -> _M:
        """The child of `metric` with these labels and the constant ones."""
        return metric.labels(**labels, **self._constant)

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        names = (*self._constant, *labels)
        return self._bare(Counter(self._prefix + name, documentation, names, registry=self.registry), labels)

    def _gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        names = (*self._constant, *labels)
        return self._bare(Gauge(self._prefix + name, documentation, names, registry=self.registry), labels)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        names = tuple(self._constant)
        histogram = Histogram(self._prefix + name, documentation, names, registry=self.registry, buckets=buckets)
        return self._bare(histogram, ())

    def _bare(self, metric: _M, labels: Sequence[str]) -> _M:
        """A metric without labels of its own is used directly, as its only child where there are constant labels."""
        return metric.labels(**self._constant) if self._constant and not labels else metric


class _EngineTotals(Collector):
    """The engine's counters: it sends totals, but prometheus_client's counters take only increments."""

    def __init__(self, prefix: str, constant: dict[str, str]) -> None:
        self._prefix = prefix
        self._constant = constant
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        preemptions = CounterMetricFamily(
            self._prefix + "num_preemptions", "Sequences preempted, by mode", labels=(*self._constant, "mode")
        )
        for mode, number in (stats.preemptions if stats else {"recompute": 0, "swap": 0}).items():
            preemptions.add_metric((*self._constant.values(), mode), number)
        yield preemptions
        for name, documentation, number in (
            ("queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries if stats else 0),
            ("hits", "Prompt tokens found in the prefix cache", stats.prefix_hits if stats else 0),
        ):
            tokens = CounterMetricFamily(f"{self._prefix}prefix_cache_{name}", documentation, labels=(*self._constant,))
            tokens.add_metric((*self._constant.values(),), number)
            yield tokens
