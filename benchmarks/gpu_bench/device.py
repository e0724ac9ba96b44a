"""The device that sections measure: a protocol, so that a rehearsal can run on the CPU, and its CUDA implementation."""

from __future__ import annotations

import gc
import itertools
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from llmservice_planner.sizing.gpu import GPU, Device, UnknownGPU, find_gpu
from llmservice_server.backend.cuda.capture import CudaCapture

Work = Callable[[], object]


class GPUDevice(Protocol):
    """A device with timers and memory control."""

    name: str
    device: torch.device
    total_bytes: int
    settings: Mapping[str, Any]
    """Settings of every engine on this device."""

    def for_planner(self) -> Device:
        """The planner's description of the device."""

    def timings_s(self, work: Work, count: int) -> list[float]:
        """Seconds per call of `work`, for `count` calls that the host launches without waiting."""

    def device_s(self, work: Work) -> float:
        """Seconds of `work` on the device without launch overhead (replayed as a CUDA graph)."""

    def busy_s(self, work: Work) -> float:
        """Seconds that kernels run during `work`."""

    def launches(self, work: Work) -> int:
        """How many kernels and graphs the host launches during `work`."""

    def host_waits(self, work: Work) -> list[str]:
        """The places (`file:line`) where the host synchronised with the device during `work`, one entry per wait."""

    def memory_taken(self, left_bytes: int) -> AbstractContextManager[None]:
        """Allocate all free memory except `left_bytes` until the block ends."""

    def synchronize(self) -> None:
        """Wait until all work is done. Raises RuntimeError if the CUDA context is unusable."""

    def release(self) -> None:
        """Release the memory that torch only caches."""


def seconds(gpu: GPUDevice, work: Work, repetitions: int = 5) -> float:
    """The median time of `work`."""
    return statistics.median(gpu.timings_s(work, repetitions))


def host_seconds(gpu: GPUDevice, work: Work, repetitions: int = 5) -> float:
    """The median time until `work` returns, on a device that has nothing else to do."""
    times = []
    for _ in range(repetitions):
        gpu.synchronize()
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    gpu.synchronize()
    return statistics.median(times)


_LESS_BYTES = 64 << 20
_WARM_UPS = 2
_LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch)")


class CudaDevice:
    """Implements `GPUDevice` with torch's current CUDA device."""

    settings: Mapping[str, Any] = {"device": "cuda"}

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()
        self.device = torch.device("cuda")
        self.total_bytes = torch.cuda.mem_get_info()[1]

    def for_planner(self) -> Device:
        try:
            return find_gpu(self.name)
        except UnknownGPU:
            return GPU(self.name, self.total_bytes)

    def timings_s(self, work: Work, count: int) -> list[float]:
        for _ in range(_WARM_UPS):
            work()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        ends[0].record()
        for end in ends[1:]:
            work()
            end.record()
        ends[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(ends)]

    def device_s(self, work: Work) -> float:
        nothing = torch.zeros(1, device=self.device)

        def recorded() -> torch.Tensor:
            work()
            return nothing

        replay, _ = CudaCapture()(recorded)
        return statistics.median(self.timings_s(replay, 10))

    def busy_s(self, work: Work) -> float:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched:
            work()
            self.synchronize()
        return float(sum(entry.self_device_time_total for entry in watched.key_averages())) * 1e-6

    def launches(self, work: Work) -> int:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as watched:
            work()
            self.synchronize()
        return sum(entry.count for entry in watched.key_averages() if _LAUNCH.match(entry.key))

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
    def memory_taken(self, left_bytes: int) -> Iterator[None]:
        self.release()
        wanted, taken = max(0, torch.cuda.mem_get_info()[0] - left_bytes), None
        while taken is None:
            try:
                taken = torch.empty(wanted, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:  # free memory may be fragmented
                wanted -= _LESS_BYTES
        yield
        del taken
        self.release()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
