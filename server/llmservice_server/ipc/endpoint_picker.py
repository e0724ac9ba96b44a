"""The metrics that endpoint pickers of the Gateway API Inference Extension read, under vLLM's names.

They choose a pod by its queue, its running requests, the use of its KV cache and the adapters that it has in memory.
https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/003-model-server-protocol
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmservice_server.types.messages import Ready, Stats


class EndpointPickerMetrics(Collector):
    """Totals over all lanes, for a picker reads one series of each name."""

    def __init__(self, model_name: str, *, with_totals: bool) -> None:
        """`with_totals` is False where the server's own metrics have these names already."""
        self._model_name = model_name
        self._with_totals = with_totals
        self._ready: Ready | None = None
        self._adapters: tuple[Sequence[str], float] = ((), time.time())
        """The adapters in memory, and since when."""
        self.stats: Stats | None = None

    def set_ready(self, ready: Ready) -> None:
        self._ready = ready

    def set_adapters(self, loaded: Sequence[str]) -> None:
        self._adapters = (loaded, time.time())

    def collect(self) -> Iterator[Metric]:
        if self._with_totals:
            yield from self._totals()
        cache = self._info("cache_config_info", "The KV cache's blocks", "block_size", "num_gpu_blocks")
        adapters = self._info(
            "lora_requests_info",
            "LoRA adapters in memory; the value is when that changed, in seconds since 1970",
            *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        if self._ready is not None:
            cache.add_metric([self._model_name, str(self._ready.block_size), str(self._ready.num_blocks)], 1)
            if self._ready.max_loras:
                names, since_s = self._adapters
                labels = [self._model_name, str(self._ready.max_loras), ",".join(names), ""]
                adapters.add_metric(labels, since_s)
        yield cache
        yield adapters

    def _totals(self) -> Iterator[Metric]:
        stats = self.stats
        blocks = stats.blocks_free + stats.blocks_held + stats.blocks_cached if stats else 0
        for name, documentation, value in (
            ("num_requests_waiting", "Requests waiting, all lanes", sum(stats.num_waiting.values()) if stats else 0),
            ("num_requests_running", "Requests running, all lanes", sum(stats.num_running.values()) if stats else 0),
            ("kv_cache_usage_perc", "As ours of that name", stats.blocks_held / max(1, blocks) if stats else 0),
        ):
            family = self._info(name, documentation)
            family.add_metric([self._model_name], value)
            yield family

    def _info(self, name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            f"vllm:{name}", f"For endpoint pickers: {documentation}", labels=["model_name", *labels]
        )
