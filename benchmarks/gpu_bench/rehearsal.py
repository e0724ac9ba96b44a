"""The rehearsal: every section with small sizes on the CPU, to test that it runs. The figures mean nothing.

Our kernels run in Triton's interpreter, so TRITON_INTERPRET must be set before they are imported.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_bench.device import Work
from gpu_bench.sizes import FULL, Sizes
from llmservice_bench.trace import Lengths
from llmservice_planner.sizing.gpu import CPU, Device

TOY = Sizes(
    config=FULL.config | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2,
    },
    copy_bytes=1 << 16, matrix=16, cold_bytes=0,
    head_dims=(24,), block_sizes=(16, 64), groups=((4, 2), (3, 1)), spans=(((0, 5), (17, 1), (0, 1)), ((9, 3),)),
    context=8, kernel_batches=(1, 3), prompts=((16, 8),), race_tokens=(32,),
    products=((128, 256),), product_rows=(3,), experts=(4, 2, 64, 32), expert_tokens=(3,),
    num_families=1, family_prompts=(3,), family_tokens=3, families_s=240.0,
    sampling_batches=(3,), swapped_blocks=8,
    max_num_seqs=4, max_model_len=96, max_num_batched_tokens=32,
    decode_batches=(1, 2), step_prompts=(16,), step_repetitions=2,
    waiting_batch=2, loop_batches=(2,), loop_steps=2, busy_batch=2,
    in_flight=2, requests=3, longest=Lengths(12, 3), peer_tokens=64, peer_s=20.0,
    memory_prompt=28, memory_tokens=8, left_bytes=0, overlap_kv_bytes=1 << 20,
)  # fmt: skip


class CPUDevice:
    """Implements `GPUDevice` on the CPU, without graphs, synchronisations and memory limits."""

    settings: Mapping[str, Any] = {
        "device": "cpu", "attention": "triton", "overlap": True, "threads": 1, "kv_cache_memory_bytes": 1 << 20,
    }  # fmt: skip

    def __init__(self) -> None:
        self.name = "no GPU: a rehearsal on the CPU"
        self.device = torch.device("cpu")
        self.total_bytes = 1 << 30

    def for_planner(self) -> Device:
        return CPU(self.total_bytes)

    def timings_s(self, work: Work, count: int) -> list[float]:
        return [self._elapsed_s(work) for _ in range(min(count, 2))]

    def device_s(self, work: Work) -> float:
        return self._elapsed_s(work)

    def busy_s(self, work: Work) -> float:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as watched:
            work()
        return float(sum(entry.self_cpu_time_total for entry in watched.key_averages())) * 1e-6

    def launches(self, work: Work) -> int:
        work()
        return 0

    def host_waits(self, work: Work) -> list[str]:
        work()
        return []

    @contextmanager
    def memory_taken(self, left_bytes: int) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        """Nothing to do: work on the CPU is synchronous."""

    def release(self) -> None:
        gc.collect()

    def _elapsed_s(self, work: Work) -> float:
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s
