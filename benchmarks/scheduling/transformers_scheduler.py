"""The schedulers of transformers' continuous batching, with the methods that the simulation calls on ours.

All decisions and all bookkeeping are theirs: `ContinuousBatchProcessor` with its scheduler, paged cache, block sharing
and offloading. Only the forward pass is left out: the cache tensor has one layer and one head, no indices into it are
made, and each sequence that reaches its last known token gets a constant one. Batches are prepared synchronously.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LogitsProcessorList
from transformers.generation.continuous_batching import cb_logits_processors, continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from llmservice_server.engine.interfaces import Plan, Scheduled
from llmservice_server.engine.request import Request

TOKEN = 7
_CPU = torch.device("cpu")
_FAST_DECODE_TOKENS = 8192  # of a request, at most, for the decode kernel with a block table: the default, 32 × 256


@dataclass(frozen=True, slots=True)
class Settings:
    """Those of `ContinuousBatchingConfig`, by default as transformers resolves them."""

    scheduler_type: str = "fifo"
    page_size: int = 256
    max_batch_tokens: int = 8192
    max_requests_per_batch: int = 1024


class _CacheWithoutIndices(PagedAttentionCache):
    """Nothing reads or writes its tensor, and indices into it would take most of the simulation's time."""

    def extend_read_and_write_indices(self, *args: Any, **kwargs: Any) -> None: ...

    def fill_block_table(self, *args: Any, **kwargs: Any) -> None: ...


class TransformersScheduler:
    """When the cache is full it offloads the newest requests that it cannot schedule: without CPU memory for them,
    which is the default, their blocks are freed, and prompt and answer are computed again ("soft reset").

    `answers` is the length of each request's answer by its id. It ends the request; nothing is predicted from it.
    """

    def __init__(self, answers: Mapping[str, int], pool_tokens: int, settings: Settings) -> None:
        # It reports that neither the device's memory nor the host's can be measured; neither is used.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        model = LlamaConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8
        )
        model._attn_implementation = "flash_attention_2"  # else masks of [max_batch_tokens, pool_tokens] are filled
        config = ContinuousBatchingConfig(
            scheduler_type=settings.scheduler_type,
            page_size=settings.page_size,
            num_blocks=pool_tokens // settings.page_size,
            max_batch_tokens=settings.max_batch_tokens,
            max_requests_per_batch=settings.max_requests_per_batch,
            max_blocks_per_request=_FAST_DECODE_TOKENS // settings.page_size,
            max_memory_percent=0.6,
            use_async_batching=False,
            use_cuda_graph=(False, False),
        )
        helper = DistributedHelper(device_mesh=None, cpu_group_timeout=None)
        cache = _CacheWithoutIndices(model, config, _CPU, helper)
        scheduler_class: Any = SCHEDULER_MAPPING[settings.scheduler_type]
        self._scheduler = scheduler_class(cache, config.safety_margin, settings.max_requests_per_batch)
        self._processor = continuous_api.ContinuousBatchProcessor(
            cache=cache,
            config=model,
            generation_config=GenerationConfig.from_dict({"do_sample": False}),
            continuous_batching_config=config,
            logit_processor=cb_logits_processors.ContinuousBatchingLogitsProcessorList(LogitsProcessorList()),
            input_queue=queue.Queue(),
            cancel_queue=queue.Queue(),
            output_router=continuous_api.OutputRouter(),
            background_thread_status=continuous_api.BackgroundThreadStatus(),
            model_device=_CPU,
            model_dtype=cache.dtype,
            scheduler=self._scheduler,
            distributed_helper=helper,
        )
        self._batch: Any = self._processor.inputs_and_outputs
        self._answers = answers
        self._requests: dict[str, Request] = {}
        self.num_preemptions = Counter({"recompute": 0})

    @property
    def free_share(self) -> float:
        """Of the cache's blocks, with those that are only kept for prefix sharing."""
        self._processor.cache.evict_cached_blocks()
        share: float = self._processor.cache.compute_free_capacity()
        return share

    def add(self, request: Request) -> None:
        name = request.request_id
        self._requests[name] = request
        self._scheduler.add_waiting_request(
            RequestState(name, list(request.token_ids), max_new_tokens=self._answers[name])
        )

    def schedule(self, now: float) -> Plan:
        """Raises RuntimeError where requests wait and none can be scheduled."""
        active = list(self._scheduler.active_requests)
        if not self._processor.prepare_next_batch():
            raise RuntimeError("transformers' scheduler left a step empty while requests wait")
        plan = Plan(preempted=[self._requests[each] for each in active if each in self._scheduler.waiting_requests])
        for share in self._batch.requests_in_batch:
            state, num_tokens = share.state, share.query_length
            start = state.position_offset - num_tokens  # the offset is already behind the step
            plan.scheduled.append(Scheduled(self._requests[state.request_id], start, num_tokens, share.has_new_token))
        self.num_preemptions["recompute"] += len(plan.preempted)
        return plan

    def commit(self, plan: Plan, failed: Collection[Request] = ()) -> Collection[Request]:
        """Append the step's tokens; those that have all of theirs end here."""
        self._batch.output_ids[:, : len(plan.scheduled)] = TOKEN
        self._processor.update_batch()
        return ()

    def finish(self, request: Request) -> None:
        """`commit` has ended it."""
        del self._requests[request.request_id]
