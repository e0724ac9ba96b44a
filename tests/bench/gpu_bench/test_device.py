"""The arithmetic of CudaDevice and its calls of torch.cuda, which a double replaces."""

import warnings
from collections.abc import Callable

import pytest
import torch

import harness.gpu.triton_interpreter  # noqa: F401 - what is imported here is not compiled
from gpu_bench.device import CudaDevice, seconds

GIB = 1 << 30


class Cuda:
    """A double of torch.cuda that has worked for `now_s` seconds; `asked` are the calls."""

    def __init__(self) -> None:
        self.now_s, self.free, self.name = 0.0, 3 << 20, "NVIDIA H200"
        self.asked: list[str] = []

    def noting(self, what: str) -> Callable[..., None]:
        return lambda *arguments: self.asked.append(" ".join([what, *map(str, arguments)]))

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.at_s = cuda, 0.0

    def record(self) -> None:
        self.at_s = self.cuda.now_s

    def synchronize(self) -> None:
        self.cuda.asked.append("wait")

    def elapsed_time(self, later: "Event") -> float:
        return (later.at_s - self.at_s) * 1e3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    double = Cuda()
    for name, stands_in in {
        "get_device_name": lambda: double.name,
        "mem_get_info": lambda: (double.free, 150 * GIB),
        "Event": double.event,
        "set_sync_debug_mode": double.noting("mode"),
        "synchronize": double.noting("synchronize"),
        "empty_cache": double.noting("empty_cache"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    return double


def test_timed_calls_are_launched_without_waiting_between_them(cuda: Cuda) -> None:
    takes_s = iter([9.0, 9.0, 1.0, 4.0, 2.0])

    def work() -> None:
        cuda.now_s += next(takes_s)

    assert CudaDevice().timings_s(work, 3) == [1.0, 4.0, 2.0]  # the first two warm up
    assert cuda.asked == ["wait"]
    takes_s = iter([9.0, 9.0, 1.0, 4.0, 2.0])
    assert seconds(CudaDevice(), work, 3) == 2.0


def test_host_waits_are_reported_by_place(cuda: Cuda) -> None:
    def work() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", UserWarning, stacklevel=1)
        warnings.warn("another matter", UserWarning, stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", UserWarning, stacklevel=1)

    first = work.__code__.co_firstlineno + 1
    assert CudaDevice().host_waits(work) == [f"test_device.py:{first}", f"test_device.py:{first + 2}"]
    assert cuda.asked == ["mode warn", "mode default"]


def test_sync_debug_mode_is_reset_after_a_failure(cuda: Cuda) -> None:
    with pytest.raises(ZeroDivisionError):
        CudaDevice().host_waits(lambda: 1 // 0)
    assert cuda.asked == ["mode warn", "mode default"]


@pytest.mark.slow
def test_free_memory_is_taken_even_if_it_is_fragmented(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, taken, empty = CudaDevice(), list[int](), torch.empty
    gpu.device = torch.device("cpu")
    cuda.free = 100 << 20

    def fragmented(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken.append(size)
        if size > 20 << 20:
            raise torch.OutOfMemoryError("in no one piece")
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", fragmented)
    with gpu.memory_taken(20 << 20):
        assert taken == [80 << 20, 16 << 20]
        assert cuda.asked == ["empty_cache"]
    assert cuda.asked == ["empty_cache", "empty_cache"]


def test_a_gpu_that_is_not_in_the_catalogue_is_planned_with_its_memory(cuda: Cuda) -> None:
    assert CudaDevice().for_planner().name == "h200-141gb"
    cuda.name = "NVIDIA Tomorrow"
    unknown = CudaDevice().for_planner()
    assert (unknown.name, unknown.memory_bytes) == ("NVIDIA Tomorrow", 150 * GIB)
