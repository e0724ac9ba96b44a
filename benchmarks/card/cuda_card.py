"""A CUDA card. Nothing here has ever run on one."""

from __future__ import annotations

import gc
import itertools
import statistics
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from card.card import Work
from llmservice_planner.gpu import GPU, Device, UnknownGPU, find_gpu
from llmservice_server.engine.graph_capture import CudaCapture

_LESS_BYTES = 64 << 20


class CudaCard:
    """Implements `Card`: the first that torch sees."""

    settings: Mapping[str, Any] = {"device": "cuda"}

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()
        self.device = torch.device("cuda")
        self.total_bytes = torch.cuda.mem_get_info()[1]

    def for_the_plan(self) -> Device:
        try:
            return find_gpu(self.name)
        except UnknownGPU:
            return GPU(self.name, self.total_bytes)

    def laps(self, work: Work, count: int, warm_ups: int = 2) -> list[float]:
        for _ in range(warm_ups):
            work()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        ends[0].record()
        for end in ends[1:]:
            work()
            end.record()
        ends[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(ends)]

    def alone_s(self, work: Work) -> float:
        nothing = torch.zeros(1, device=self.device)

        def recorded() -> torch.Tensor:
            work()
            return nothing

        replay, _ = CudaCapture()(recorded)
        return statistics.median(self.laps(replay, 10))

    def busy_s(self, work: Work) -> float:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched:
            work()
            self.synchronize()
        return float(sum(entry.self_device_time_total for entry in watched.key_averages())) * 1e-6

    def host_waits(self, work: Work) -> list[str]:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
        return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]

    @contextmanager
    def crowded(self, left_bytes: int) -> Iterator[None]:
        self.release()
        wanted, taken = max(0, torch.cuda.mem_get_info()[0] - left_bytes), None
        while taken is None:
            try:
                taken = torch.empty(wanted, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:  # what is free need not be in pieces that anybody can have
                wanted -= _LESS_BYTES
        yield
        del taken
        self.release()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
